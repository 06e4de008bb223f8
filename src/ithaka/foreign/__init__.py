"""Private parts of other libraries: their names that start with an underscore, and modules behind
such names. The rest of ithaka uses them under the names here (tests/test_private_surfaces.py)."""
