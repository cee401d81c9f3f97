"""Windows into the machine: look at a token, an instruction, a row of attention, a run, a pool.

==================  ==================================================================================================
``explain``         a position or a slot: block, offset, slot, bytes; ``splits``: how its write is cut into work
``coalesce``        what a warp's loads and stores cost in sectors
``softmax``         the online softmax of a row, tile by tile
``tracer``          a backend that records what it is asked (``record``) and delegates; ``derive``: every address of it
``recorder``        records a run of the engine (``run``); ``figures``, ``chrome`` and ``view`` show it
``audit``           what is wrong with a pool (``poolstate``) or a run; ``poolmap`` draws it
==================  ==================================================================================================

Nothing here is imported by the rooms below, and nothing prints: the commands are in :mod:`pagetile.cli.windows`.
"""
