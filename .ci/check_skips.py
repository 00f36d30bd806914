"""Fails where a JUnit report of pytest holds no test, or a skip that is not expected: `check_skips.py REPORT.xml`."""

import pathlib
import sys
import xml.etree.ElementTree as ElementTree


def main(report: str) -> None:
  lines = pathlib.Path(__file__).with_name('expected_skips.txt').read_text().splitlines()
  expected = {line.strip() for line in lines if line.strip() and not line.startswith('#')}
  cases = list(ElementTree.parse(report).iter('testcase'))
  if not cases:
    sys.exit('error: no test ran')
  skips = [(case, skip.get('message', '')) for case in cases for skip in case.iter('skipped')]
  unexpected = [f'{case.get("classname")}.{case.get("name")}: {why}' for case, why in skips if why not in expected]
  if unexpected:
    sys.exit('error: unexpected skips, to be fixed or named in .ci/expected_skips.txt:\n' + '\n'.join(unexpected))
  print(f'{len(cases)} tests, {len(skips)} expected skips')


if __name__ == '__main__':
  main(sys.argv[1])
