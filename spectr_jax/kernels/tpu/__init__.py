"""Forms for TPUs for which only the compiler's counts speak: nothing here has run on a chip."""
