"""All figures by name."""

from decode import rejection_figures, token_figures

FIGURES = token_figures.FIGURES | rejection_figures.FIGURES
