"""The native CPU kernels: one shared library of plain C functions, built from the C++ sources in this folder.

`library.py` opens it, `build.py` makes it; the operations' own folders hold the Python functions that call it. Imports
nothing, so that `python -m procengine.kernels.native.build` runs the module once.
"""
