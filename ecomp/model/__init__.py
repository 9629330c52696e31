"""The pure core: values, and functions from values to values. No module here does I/O."""
