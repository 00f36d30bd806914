"""Published heads: EAGLE-1, 2 and 3, the speculators format, DFlash 1 and 2, DSpark, Medusa-1, MTP."""
