"""Hook of MkDocs: formulas become MathML, which browsers set without scripts and without a network.

Pages have formulas as GitHub sets them: between dollar signs within a line, and in blocks fenced as `math`.
`pymdownx.arithmatex` finds them and keeps Markdown away from them.
"""

import html
import re

from latex2mathml.converter import convert


def on_page_markdown(markdown: str, **_) -> str:
  """Replaces the fences of formulas by the signs that `arithmatex` looks for."""
  return re.sub(r'^```math\n(.*?)^```$', r'$$\n\1$$', markdown, flags=re.DOTALL | re.MULTILINE)


def on_page_content(content: str, **_) -> str:
  """Replaces the formulas of a page by MathML."""
  formula = r'<(div|span) class="arithmatex">(?:\\\(|\\\[)(.*?)(?:\\\)|\\\])</\1>'
  kinds = {'div': 'block', 'span': 'inline'}
  return re.sub(
    formula, lambda found: convert(html.unescape(found[2]), display=kinds[found[1]]), content, flags=re.DOTALL
  )
