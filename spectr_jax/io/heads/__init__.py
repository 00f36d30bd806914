"""Published heads: EAGLE-1, 2 and 3, the speculators format, DFlash, DSpark, Medusa-1, MTP."""
