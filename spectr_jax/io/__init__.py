"""Files of models and tokenizers.

Whatever a file of somebody else holds, reading it ends in a result or in a `ValueError` of one line that names the file
and the fault. This holds for every reader in this package, within the bounds of docs/security.md; docstrings repeat it
for what others call.
"""
