"""Methods added by users of the library."""
