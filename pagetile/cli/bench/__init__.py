"""``pagetile bench``: pagetile beside whatever else is installed, on the same bytes, in one run.

What ships here is what a user needs to reproduce a figure on a machine of their own: the workloads, the contenders, the
clock and the gate. What stays in ``benchmarks/`` of the repository is for its developers: runs that gather everything
for a results file, and the results.
"""
