"""The call surfaces of other libraries, over the public ops: for code that was written for them."""
