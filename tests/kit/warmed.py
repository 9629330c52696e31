"""Imported last by the server that warm processes are forked from, to freeze its objects.

Otherwise a garbage collection in a child would write to, and so copy, every page.
https://docs.python.org/3/library/gc.html#gc.freeze
"""

import gc

gc.collect()
gc.freeze()
