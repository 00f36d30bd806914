"""The trace page in a browser: `pytest -m browser`, with the extra `browser` and a Chromium."""

import contextlib
import html
import json
import pathlib
import re
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decode import trace
from decode.experiment.options import DecodeOptions
from spectr_jax import theory
from spectr_jax.couplings import KSeq

pytestmark = pytest.mark.browser
_PROMPT = 'the quick <b>brown</b> fox </script>'
_SIZES = {'desktop': (1280, 860), 'tablet': (768, 1024), 'phone': (390, 844)}


@pytest.fixture(scope='module')
def data(pair):
  options = DecodeOptions.of(
    **pair, method=('race_block',), num_drafts=(3,), draft_length=(3,), prompt=_PROMPT, max_new_tokens=12
  )
  return trace.record_trace(options, ('spectr', 'speculative', 'traversal', 'race_traversal'))


@pytest.fixture(scope='module')
def address(data, tmp_path_factory):
  path = tmp_path_factory.mktemp('page') / 'trace.html'
  path.write_text(trace.make_page(data), encoding='utf-8')
  return path.as_uri()


@pytest.fixture(scope='module')
def browser():
  playwright = pytest.importorskip('playwright.sync_api', reason='needs the extra `browser`')
  names = 'chromium', 'chromium-browser', 'google-chrome'
  path = next(filter(None, map(shutil.which, names)), None)  # else the one that playwright has installed
  with playwright.sync_playwright() as running:
    browser = running.chromium.launch(executable_path=path, args=['--no-sandbox'])
    yield browser
    browser.close()


@contextlib.contextmanager
def _opened(browser, address, size='desktop', **options):
  """A page on which nothing may go wrong and which may load nothing but itself."""
  width, height = _SIZES[size]
  page = browser.new_page(viewport={'width': width, 'height': height}, **options)
  problems, requests = [], []
  page.on('console', lambda message: problems.append(message.text) if message.type in ('error', 'warning') else None)
  page.on('pageerror', lambda error: problems.append(str(error)))
  page.on('request', lambda request: requests.append(request.url))
  page.goto(address)
  try:
    yield page
    assert not problems
    assert [url.split('#')[0] for url in requests if not url.startswith('data:')] == [address.split('#')[0]]
  finally:
    page.close()


@pytest.fixture
def page(browser, address):
  with _opened(browser, address) as page:
    yield page


def _press(page, *keys):
  for key in keys:
    page.keyboard.press(key)


def _place(page):
  return int(page.input_value('#place'))


def _choose(page, selector, label):
  """Chooses from a menu, and leaves the keyboard to the page."""
  page.select_option(selector, label=label)
  page.evaluate('document.activeElement.blur()')


def _index(data, name):
  return [method['name'] for method in data['methods']].index(name)


def test_steps_by_keyboard_and_buttons(page, data):
  assert page.title() == 'race_block, step by step'
  assert page.inner_text('#text') == _PROMPT
  assert page.locator('#text b').count() == 0  # a prompt is text, not markup
  assert page.inner_text('#round-title') == f'Round 1 of {len(data["rounds"])}'
  _press(page, 'ArrowRight', 'ArrowRight')
  assert _place(page) == 2
  _press(page, 'ArrowLeft')
  assert _place(page) == 1
  page.click('#forward')
  page.click('#back')
  assert _place(page) == 1
  page.click('#next-round')
  assert page.inner_text('#round-title').startswith('Round 2 ')
  _press(page, 'PageDown', 'PageUp', 'PageUp')
  assert page.inner_text('#round-title').startswith('Round 1 ')
  page.focus('#place')  # the slider has the arrow keys of its own
  _press(page, 'ArrowRight')
  assert _place(page) == 1
  page.evaluate('document.activeElement.blur()')
  _press(page, 'End')
  text = ''.join(piece for played in data['rounds'] for piece in played['pieces'])
  assert page.text_content('#text') == _PROMPT + text
  num_tokens = sum(len(played['pieces']) for played in data['rounds'])
  assert page.inner_text('#rate') == f'{num_tokens / len(data["rounds"]):.2f}'
  assert page.is_disabled('#forward')
  pieces = [pair for played in data['rounds'] for pair in zip(played['pieces'], played['origins']) if pair[0]]
  for origin, kind in enumerate(('draft', 'correction', 'bonus')):
    shown = [piece for piece, own in pieces if own == origin]
    assert page.locator(f'#text .origin.{kind}').all_text_contents() == shown
  _press(page, 'Home')
  assert _place(page) == 0


def test_every_step_shows_without_error(page, data):
  last = int(page.get_attribute('#place', 'max'))
  assert last > 4 * len(data['rounds'])
  for _ in range(last):
    _press(page, 'ArrowRight')
    assert page.inner_text('#caption')
  assert _place(page) == last
  own = data['rounds'][-1]['judgements'][0]
  kept = page.locator('.panel.first .node.is-kept:not(.root)').evaluate_all('nodes => nodes.map(n => +n.dataset.node)')
  assert kept == own['path']


def test_plays_and_pauses(page):
  _choose(page, '#speed', 'fast')
  _press(page, ' ')
  assert page.get_attribute('#play', 'aria-label') == 'Pause'
  begin = time.monotonic()
  while _place(page) < 2:
    assert time.monotonic() < begin + 20
    page.wait_for_timeout(50)
  page.click('#play')
  assert page.get_attribute('#play', 'aria-label') == 'Play'
  stopped = _place(page)
  page.wait_for_timeout(700)
  assert _place(page) == stopped


def test_two_methods_on_the_same_drafts(page, data):
  def tokens(panel):
    return page.locator(f'.panel.{panel} .node .token').all_text_contents()

  def numbers(panel):
    return page.locator(f'.panel.{panel} :is(.prob.p, .prob.q) em').all_text_contents()

  for name in ('spectr', 'speculative', 'traversal', 'race_traversal'):
    _choose(page, '#other', name)
    assert page.locator('.panel h3').all_text_contents() == ['race_block', name]
    assert tokens('first') == tokens('second')
    assert numbers('first') == numbers('second')
    index = _index(data, name)
    _press(page, 'Home', 'PageDown', 'PageDown', 'ArrowLeft')  # how the second round ends
    judgement = data['rounds'][1]['judgements'][index]
    assert page.locator('.panel.second .node.is-kept:not(.root)').count() == len(judgement['path'])
    assert page.locator('.panel.second .chips .origin').count() == len(judgement['path']) + 1
    outside = page.locator('.panel.second .node.is-outside').count()
    assert outside == len(data['parents']) + 1 - len(data['methods'][index]['nodes'])
  _choose(page, '#other', 'nothing')
  assert page.locator('.panel').count() == 1


def test_a_decision_is_shown_with_its_numbers(page, data):
  _choose(page, '#other', 'spectr')
  _press(page, 'ArrowRight', 'ArrowRight')
  index = _index(data, 'spectr')
  decision = data['rounds'][0]['judgements'][index]['decisions'][0]
  rows = page.locator('.panel.second table.numbers tbody tr')
  assert rows.count() == len(decision['nodes'])
  assert f'γ = {decision["gamma"]:.2f}' in page.inner_text('.panel.second .facts')
  share = float(rows.nth(0).locator('td').last.inner_text().replace('−', '-'))
  assert share == pytest.approx(decision['shares'][0], abs=6e-4)
  line = page.locator('.panel.second .unit').bounding_box()
  marker = page.locator('.panel.second .marker').bounding_box()
  assert (marker['x'] - line['x']) / line['width'] == pytest.approx(decision['uniform'], abs=0.02)
  slices = page.locator('.panel.second .slice').evaluate_all('all => all.map(s => s.getBoundingClientRect().width)')
  assert slices[0] / sum(slices) == pytest.approx(decision['shares'][0], abs=0.02)


def _value(text):
  """The number that the page shows as `text`; 0 for the sign of none."""
  return 0.0 if text == '–' else float(text.replace('−', '-').replace('…', ''))


def test_branches_of_race_traversal_are_shown_with_credit_and_share(page, data):
  _choose(page, '#other', 'race_traversal')
  index = _index(data, 'race_traversal')
  num_kept = num_rejected = 0
  assert page.is_visible('#credit-legend')
  for place, played in enumerate(data['rounds']):
    _press(page, 'Home', *['PageDown'] * place, 'ArrowRight', 'ArrowRight')
    decisions = played['judgements'][index]['decisions']
    assert page.locator('.panel.first .prob.credit').count() == 0
    boxes = page.locator('.panel.second .prob.credit em').all_text_contents()
    exists = [token >= 0 for token in played['tokens']]
    credits = played['judgements'][index]['credits'][1:]
    assert [text != '–' for text in boxes] == exists
    np.testing.assert_allclose([_value(text) for text in boxes], np.where(exists, credits, 0), atol=6e-4)
    for count, decision in enumerate(decisions, start=1):
      sentence = page.inner_text('.panel.second .sentence')
      lines = page.locator('.panel.second .facts li').all_inner_texts()
      assert [line.split(' = ')[0].split(': ')[-1] for line in lines] == ['P', 'm', 'P', 'h']
      names = 'above', 'picked_share', 'above', 'ratio', 'mass', 'mass', 'before', 'kept'
      # From the number behind each sign: of the credit above, of m = s · min(1, P · q/p̃) and of P = m / (1 − Σ m).
      above = re.search(r'P = (\S+)$', lines[0])
      product = re.search(r' = (\S+) · min\(1, (\S+) · (\S+)\) = (\S+)$', lines[1])
      quotient = re.search(r' = (\S+) / \(1 − (\S+)\) = (\S+)$', lines[2])
      shown = [_value(text) for match in (above, product, quotient) for text in match.groups()]
      wanted = np.array([decision[name] for name in names])
      np.testing.assert_allclose(shown, wanted, atol=6e-4, rtol=0.06)
      np.testing.assert_allclose(wanted[4], wanted[1] * min(1, wanted[2] * wanted[3]), rtol=1e-4, atol=1e-9)
      np.testing.assert_allclose(wanted[7], wanted[5] / (1 - wanted[6]) if wanted[5] else 0, rtol=1e-3, atol=1e-6)
      # Of a leaf h = P, else of what the target has left: S/(S + 1 − P).
      inner = re.fullmatch(r'h = S / \(S \+ 1 − P\) = (\S+) / \((\S+) \+ (\S+)\) = (\S+), where S is .*', lines[3])
      assert (inner is not None) == (abs(decision['shares'][0] - decision['kept']) >= 1e-9)
      facts = {'h': lines[3].removeprefix('h = ') if inner is None else inner[4]}
      if inner is not None:
        left, again, rest = map(_value, inner.groups()[:3])
        assert left == again
        assert rest == pytest.approx(1 - decision['kept'], abs=1e-3)  # digits are cut off
        assert left / (left + rest) == pytest.approx(decision['shares'][0], abs=6e-4, rel=0.06)
      assert _value(facts['h']) == pytest.approx(decision['shares'][0], abs=6e-4)
      note = page.inner_text('.panel.second .why p.note')
      assert ('The credit of this branch ends at' in note) == (decision['above'] == 0)
      state = page.locator(f'.panel.second .node[data-node="{decision["node"]}"]').get_attribute('class').split()
      if decision['chosen'] >= 0:
        assert f'< h = {facts["h"]}: the path is kept down to' in sentence
        assert 'is-kept' in state
        num_kept += 1
      else:
        assert f'≥ h = {facts["h"]}: not kept down to' in sentence
        left = 'no branch is left.' if count == len(decisions) else 'the branches after it are still tried.'
        assert sentence.endswith(left)
        assert 'is-rejected' in state
        num_rejected += 1
      _press(page, 'ArrowRight')
  assert num_kept
  assert num_rejected


def test_race_traversal_decides_on_all_nodes_that_spell_the_same(page, data):
  method = next(method for method in data['methods'] if method['name'] == 'race_traversal')
  played = data['rounds'][0] | {'places': [0, 1, 1, 3, 4, 4, 6, 7, 8, 9]}  # two drafts begin with two equal tokens
  decisions = [
    {'kind': 'keep', 'node': node, 'chosen': chosen, 'picked_share': 1, 'nodes': [node]}
    for node, chosen in ((7, -1), (8, -1), (4, 4))
  ]
  states = page.evaluate(
    '([round, method, decisions]) => [2, 3].map((n) => nodeStates(round, method, {decisions, path: [1, 4]}, n, false))',
    [played, method, decisions],
  )
  assert states[0] == ['kept', '', '', '', '', '', '', 'rejected', 'rejected', '']
  assert states[1] == ['kept', 'kept', 'same', '', 'kept', 'same', '', 'rejected', 'rejected', '']
  decisions[2]['chosen'] = -1
  arguments = [played, method, decisions]
  states = page.evaluate('([round, method, decisions]) => nodeStates(round, method, {decisions}, 3, false)', arguments)
  assert states == ['kept', '', '', '', 'rejected', 'rejected', '', 'rejected', 'rejected', '']


def test_laws_of_a_node_go_to_the_sandbox(page, data):
  _press(page, 'ArrowRight')
  page.click('.panel.first .node[data-node="1"]')
  played = data['rounds'][0]
  rows = played['laws'][str(played['places'][1])]
  assert page.locator('#laws li').count() == len(rows)
  page.click('#to-sandbox')
  assert page.input_value('#preset') == 'distributions of the trace'
  assert page.locator('#sliders .slider').count() == 2 * (len(rows) + 1)
  shown = page.locator('#sliders output').all_text_contents()
  assert float(shown[1]) == pytest.approx(rows[0][2], abs=2e-3)


def test_a_method_without_a_record_is_said_to_have_none(browser, data, tmp_path):
  silent = json.loads(json.dumps(data))
  for played in silent['rounds']:
    for name in ('decisions', 'credits', 'law', 'next_prob'):
      del played['judgements'][0][name]
  path = tmp_path / 'trace.html'
  path.write_text(trace.make_page(silent), encoding='utf-8')
  with _opened(browser, path.as_uri()) as page:
    _choose(page, '#other', 'nothing')
    _press(page, 'ArrowRight', 'ArrowRight')  # there is nothing between the target's call and the verdict
    assert 'keeps no record' in page.inner_text('.panel.first .why')
    assert page.locator('.panel.first .chips .origin').count() == len(data['rounds'][0]['judgements'][0]['path']) + 1


_THEORY = {
  'specinfer': theory.recursive_acceptance,
  'kseq': theory.kseq_acceptance,
  'race': theory.race_acceptance,
  'optimum': theory.optimal_acceptance,
  'gamma': lambda p, q, n: jax.vmap(KSeq().gamma, (0, 0, None))(p, q, jnp.array(n)),
}


def test_the_sandbox_computes_what_the_theory_does(page):
  rng = np.random.default_rng(0)
  laws = rng.dirichlet(np.full(7, 0.6), (12, 2))
  laws[rng.random(laws.shape) < 0.1] = 0
  laws /= laws.sum(-1, keepdims=True)
  for num_drafts in (1, 2, 4, 9):
    computed = page.evaluate(
      '([laws, n]) => laws.map(([p, q]) => Object.fromEntries('
      '["speculative", "specinfer", "kseq", "race", "optimum", "gamma"].map((rule) => [rule, RULES[rule](p, q, n)])))',
      [laws.tolist(), num_drafts],
    )
    p, q = np.float32(laws[:, 0]), np.float32(laws[:, 1])
    np.testing.assert_allclose([each['speculative'] for each in computed], np.minimum(p, q).sum(-1), atol=1e-5)
    for rule, acceptance in _THEORY.items():
      wanted = jax.jit(acceptance, static_argnums=2)(p, q, num_drafts)
      # A threshold is computed up to (n - 1) / 2^16, and classes can fall differently where a ratio is on an edge.
      tolerance = {'kseq': 2e-4, 'gamma': 2e-4, 'race': 1e-3}.get(rule, 2e-5)
      np.testing.assert_allclose([each[rule] for each in computed], wanted, atol=tolerance, err_msg=rule)
  page.select_option('#preset', label='Ber(¼) to Ber(½)')
  page.fill('#candidates', '2')
  shown = page.locator('#acceptance li').evaluate_all('all => all.map((li) => [li.dataset.rule, li.innerText])')
  shown = {rule: float(re.search(r'[\d.]+$', text.strip())[0]) for rule, text in shown}
  assert shown['speculative'] == 0.75
  assert shown['optimum'] == 0.9375
  assert shown['kseq'] == pytest.approx(0.8476, abs=1e-4)
  page.locator('#sliders input.p').first.fill('50')
  page.locator('#sliders input.p').nth(1).fill('50')
  values = page.locator('#acceptance li').evaluate_all('all => all.map((li) => +li.dataset.value)')
  np.testing.assert_allclose(values, 1)


def test_how_to_read_it_comes_first_and_rules_are_in_words(page, data):
  assert page.locator('main h2').first.inner_text() == 'How to read this page'
  for link in page.locator('.contents a').evaluate_all('all => all.map((a) => a.getAttribute("href"))'):
    assert page.locator(link).count() == 1, link
  for place, panel in enumerate(page.locator('.panel').all()):
    name = panel.locator('h3').inner_text()
    method = next(method for method in data['methods'] if method['name'] == name)
    assert panel.locator('.plain').inner_text().startswith(method['plain'])
    assert ' '.join(panel.locator('.rule li').all_inner_texts()) == method['rule'], place
    classes = panel.evaluate('panel => [...panel.children].map((child) => child.className.split(" ")[0])')
    assert classes.index('plain') < classes.index('rule')


def test_no_box_is_empty(page, data):
  boxes = '.card, .panel, .why, .table-scroll, #laws, #laws li, #acceptance, #speed-run, #speed-chart, .sliders, .plain'
  empty = f'''() => [...document.querySelectorAll("{boxes}")].filter((e) => e.offsetHeight > 8
    && !e.innerText.trim() && !e.querySelector("svg")).map((e) => e.outerHTML)'''
  for step in range(5):
    assert page.evaluate(empty) == [], step
    if step < 2:  # the guesses, then the guesses with their scores
      cards = page.locator('.why')
      assert cards.count() == 2
      for card in cards.all():
        assert card.locator('h4').inner_text().startswith('Scored guesses' if step else 'Guesses')
        assert card.locator('thead th').count() == (5 if step else 3)
      rows = cards.first.locator('tbody tr')
      assert rows.count() == 3
      played = data['rounds'][0]
      for branch, row in enumerate(rows.all()):
        product = np.prod([played['draft'][3 * depth + branch] for depth in range(3)])  # numbered level by level
        shown = float(row.locator('td').nth(1).inner_text().replace('−', '-'))
        assert shown == pytest.approx(product, rel=0.06, abs=6e-4)
    _press(page, 'ArrowRight')


def test_a_link_opens_its_step(browser, page, address, data):
  _choose(page, '#other', 'race_traversal')
  _press(page, 'PageDown', 'ArrowRight', 'ArrowRight')
  link = page.get_attribute('#link', 'href')
  assert link == '#round=2&step=3&with=race_traversal'
  place, caption = _place(page), page.inner_text('#caption')
  with _opened(browser, address + link) as opened:
    assert _place(opened) == place
    assert opened.inner_text('#caption') == caption
    assert opened.locator('.panel h3').all_text_contents() == ['race_block', 'race_traversal']
    assert 0 <= opened.locator('#stage').bounding_box()['y'] < 100
    opened.evaluate('location.hash = "#round=1&step=2&with=nothing"')
    opened.wait_for_function('document.getElementById("place").value === "1"')
    assert opened.locator('.panel').count() == 1
    for other in ('#calculator', '#round=x', '#step=4', '#round=1.5'):  # no step: the page stays where it is
      opened.evaluate(f'location.hash = "{other}"')
      opened.wait_for_timeout(50)
      assert _place(opened) == 1
    opened.evaluate('location.hash = "#round=999&step=999"')  # the last one
    opened.wait_for_function('document.getElementById("place").value === document.getElementById("place").max')
  page.click('#link')
  assert page.evaluate('location.hash') == link
  assert _place(page) == place


def test_the_calculator_computes_what_the_theory_does(page, data):
  rates, lengths = np.array([0, 0.3, 0.76, 0.99, 1]), np.array([1, 4, 16])
  shown = page.evaluate(
    '([rates, lengths]) => rates.map((a) => lengths.map((length) => SPEED.chainTokens(a, length)))',
    [rates.tolist(), lengths.tolist()],
  )
  np.testing.assert_allclose(shown, theory.expected_chain_tokens(rates[:, None], lengths), rtol=1e-12)
  setting = {'a': 0.7, 'numDrafts': 3, 'length': 5, 'draftCost': 0.1, 'guessCost': 0.02}
  tokens = theory.expected_chain_tokens(1 - 0.3**3, 5)
  wanted = theory.speed_up(tokens, 5, draft_cost=0.1, call_cost=1 + 15 * 0.02)
  assert page.evaluate('(setting) => SPEED.speedUp(setting)', setting) == pytest.approx(float(wanted))
  best = page.evaluate('(setting) => SPEED.bestLength(setting, 24)', setting)
  lengths = np.arange(1, 25)
  tokens = theory.expected_chain_tokens(1 - 0.3**3, lengths)
  by_length = theory.speed_up(tokens, lengths, draft_cost=0.1, call_cost=1 + 0.06 * lengths)
  assert best == np.argmax(by_length) + 1
  assert page.evaluate('SPEED.acceptanceOf(SPEED.chainTokens(.6, 7), 7)') == pytest.approx(0.6)
  # Sliders, by hand.
  for name, value in setting.items():
    page.fill(f'#knob-{name}', str(value))
  assert page.inner_text('#speed-up') == f'{wanted:.2f}×'
  assert page.inner_text('#speed-verdict') == 'It pays.'
  assert page.input_value('#costs') == 'your own'
  assert 'approximately' in page.inner_text('#speed-steps')
  page.select_option('#costs', label='a large batch')
  assert page.inner_text('#speed-verdict') == 'It does not pay.'
  # The run's methods at these costs, each with its own guesses: the first draft alone, or three of three.
  for index, method in enumerate(data['methods']):
    kept = np.mean([len(played['judgements'][index]['path']) + 1 for played in data['rounds']])
    value = float(page.get_attribute(f'#speed-run li[data-method="{method["name"]}"]', 'data-value'))
    assert value == pytest.approx(kept / (1 + 3 * 0.05 + len(method['nodes']) - 1)), method['name']
  page.click('#speed-own')
  kept = np.mean([len(played['judgements'][0]['path']) + 1 for played in data['rounds']])
  rate = float(page.input_value('#knob-a'))
  assert theory.expected_chain_tokens(rate, 3) == pytest.approx(kept, abs=0.05)


def test_the_sample_of_the_docs_opens(browser):
  path = pathlib.Path(trace.__file__).parents[1] / 'docs' / 'sample_trace.html'
  (shown,) = re.findall(r'<title>(.*?)</title>', path.read_text(encoding='utf-8'))
  with _opened(browser, path.as_uri()) as page:
    assert page.title() != html.unescape(shown)  # its script has run
    _press(page, 'End')
    assert float(page.inner_text('#rate')) > 2


@pytest.mark.parametrize('scheme', ['light', 'dark'])
@pytest.mark.parametrize('size', _SIZES)
def test_fits_every_size(browser, address, size, scheme):
  with _opened(browser, address, size, color_scheme=scheme, reduced_motion='reduce') as page:
    width = _SIZES[size][0]
    for keys in ((), ('ArrowRight',) * 3, ('PageDown',), ('End',)):
      _press(page, *keys)
      assert page.evaluate('document.documentElement.scrollWidth') <= width
    # The player is always there, and nothing of it is cut off.
    for name in ('#previous-round', '#play', '#next-round', '#place', '#place-out'):
      box = page.locator(name).bounding_box()
      assert box['x'] >= 0
      assert box['x'] + box['width'] <= width
      assert box['y'] + box['height'] <= _SIZES[size][1]
    assert page.evaluate('getComputedStyle(document.body).colorScheme') == scheme


def _luminance(color):
  channels = np.array(json.loads(re.sub(r'rgba?\((.*)\)', r'[\1]', color))[:3]) / 255
  return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]


@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_is_accessible(browser, address, scheme):
  with _opened(browser, address, color_scheme=scheme) as page:
    _press(page, 'End')
    unnamed = page.evaluate(
      '[...document.querySelectorAll("button, select, input")].filter((e) => !(e.innerText.trim() ||'
      ' e.getAttribute("aria-label") || e.labels?.length)).map((e) => e.outerHTML)'
    )
    assert unnamed == []
    page.focus('body')
    _press(page, 'Tab')
    assert page.evaluate('document.activeElement.className') == 'skip'
    _press(page, 'Tab')
    assert page.evaluate('getComputedStyle(document.activeElement).outlineStyle') == 'solid'
    # Text on its ground, by WCAG's contrast: at least 4.5.
    grounds = dict.fromkeys(('#caption', '#about'), 'body') | {'#reference': '.code'}
    grounds |= dict.fromkeys(('.origin.prompt', '.note', '.contents a', '.plain'), '.card')
    grounds |= {itself: itself for itself in ('#text .origin.draft', '.formula')}
    for text, ground in grounds.items():
      color = page.evaluate('(s) => getComputedStyle(document.querySelector(s)).color', text)
      behind = page.evaluate('(s) => getComputedStyle(document.querySelector(s)).backgroundColor', ground)
      light, dark = sorted((_luminance(color), _luminance(behind)), reverse=True)
      assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, color, behind)
