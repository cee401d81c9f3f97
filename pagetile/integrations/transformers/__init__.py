"""Transformers over blocks: ``generate`` and ``generate_batch`` of an ordinary model.

    from pagetile.integrations.transformers import enable, disable

    enable(model)
    model.generate(**inputs)            # keys and values in blocks, beams share them
    model.generate_batch(prompts)       # continuous batching, without masks and gathers
    disable(model)

See ``docs/integrations/transformers.md``.
"""

from pagetile.integrations.transformers.cache import PagedCache
from pagetile.integrations.transformers.pages import Settings
from pagetile.integrations.transformers.switch import disable, enable, enabled, settings_of

__all__ = ["PagedCache", "Settings", "disable", "enable", "enabled", "settings_of"]
