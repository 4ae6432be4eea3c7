"""What `detlogp audit`, `probe`, `validate` and `bench` are made of.

One file for each thing that is shown: layouts.py (the same rows presented otherwise), accuracy.py,
routes.py (ways to a derivative), kernels.py (what really ran); peers.py says who is audited.
"""
