"""`python -m benchmarks`: operators beside their peers, each result checked, then timed.

timing.py     how a call is timed: GPU and CPU
shapes.py     lengths of sequences, drawn from a seed; precisions
operands.py   attention's operands, their bytes and operations
candidate.py  what is timed: a differentiable function and its tensors
implementations.py    attention, ours and the peers', made ready to run
checking.py   checks results, sequence by sequence
peers.py cudnn_frontend.py    other implementations, found by import
session.py    one run: its timer, its options, what it has measured; floors and bars
report.py     environment, JSON and tables
results.py    reads a results file
plot.py table.py stamp.py    figures, README's tables and the commit of a results file
table1.py grid.py attention.py unseen.py mixed.py rows.py norm.py hstu.py sweep.py host.py
modules.py build.py    the commands; attention.py has three
"""
