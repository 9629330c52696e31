"""Imported last by the server that warm processes are forked from: what it has imported stays theirs together.

A collection of garbage in a child would else write into every page of it, and so copy them all.
https://docs.python.org/3/library/gc.html#gc.freeze
"""

import gc

gc.collect()
gc.freeze()
