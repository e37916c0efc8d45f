"""Terminal output: step lines and sentences of a run, progress of long work, screen of `anabranch top`.

Not here: the fold of events behind them (`observe.view`) and help texts (`cli`).

Imported by: api, audit, cli, evaluation, node.
"""
