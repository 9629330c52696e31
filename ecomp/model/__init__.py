"""The core. Pure: values, and functions from values to values. Nothing here does I/O."""
