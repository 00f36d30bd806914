"""Networks behind the `Model` seam."""
