"""The kit of this folder is imported by name (twin, hopper_ahead, hopper_sass)."""
