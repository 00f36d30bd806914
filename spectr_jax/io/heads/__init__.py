"""Published heads: EAGLE-1, 2 and 3, the speculators format, Medusa-1, MTP."""
