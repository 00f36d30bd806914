"""The commands that train, which need the extra `train`."""
