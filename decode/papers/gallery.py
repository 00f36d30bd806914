"""All figures by name."""

from decode.papers import ladder_figures, method_figures, rejection_figures, token_figures, tree_figures

FIGURES = (
  token_figures.FIGURES
  | rejection_figures.FIGURES
  | tree_figures.FIGURES
  | method_figures.FIGURES
  | ladder_figures.FIGURES
)
