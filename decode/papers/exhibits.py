"""All exhibits by name: tables and figures of the papers."""

from decode.papers import (
  gbv_tables,
  method_figures,
  rejection_figures,
  spec_bench,
  spectr_tables,
  token_figures,
  tree_figures,
)

TABLES = spectr_tables.TABLES | gbv_tables.TABLES | spec_bench.TABLES
FIGURES = token_figures.FIGURES | rejection_figures.FIGURES | tree_figures.FIGURES | method_figures.FIGURES
EXHIBITS = TABLES | FIGURES
