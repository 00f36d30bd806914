"""Fails where a JUnit report of pytest holds no test, or a skip whose reason no line of a file names.

Usage: check_skips.py REPORT.xml [EXPECTED_SKIPS.txt]
"""

import pathlib
import sys
import xml.etree.ElementTree as ElementTree


def main(report: str, expected_skips: str | None = None) -> None:
  lines = pathlib.Path(expected_skips).read_text().splitlines() if expected_skips else []
  expected = {line.strip() for line in lines if line.strip() and not line.startswith('#')}
  cases = list(ElementTree.parse(report).iter('testcase'))
  if not cases:
    sys.exit('error: no test ran')
  skips = [(case, skip.get('message', '')) for case in cases for skip in case.iter('skipped')]
  unexpected = [f'{case.get("classname")}.{case.get("name")}: {why}' for case, why in skips if why not in expected]
  if unexpected:
    sys.exit('error: unexpected skips, to be fixed, or named in a file of expected ones:\n' + '\n'.join(unexpected))
  print(f'{len(cases)} tests, {len(skips)} expected skips')


if __name__ == '__main__':
  main(*sys.argv[1:])
