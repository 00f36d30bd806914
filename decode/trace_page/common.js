'use strict';
// Shared by all parts: the run, texts of tokens, numbers, and elements. Text is inserted as text, never as markup.

const DATA = JSON.parse(document.getElementById('data').textContent);
const ORIGINS = ['draft', 'correction', 'bonus'];

// The tree: node 0 is the last token of the text, the others are guesses.
const TREE = (() => {
  const parents = [0, ...DATA.parents];
  const children = parents.map(() => []);
  const depths = [0];
  for (let node = 1; node < parents.length; node++) {
    children[parents[node]].push(node);
    depths[node] = depths[parents[node]] + 1;
  }
  return {parents, children, depths, maxDepth: Math.max(...depths), size: DATA.parents.length};
})();

function byId(id) {
  return document.getElementById(id);
}

/** Creates an element. Children are elements or texts; null is skipped. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null));
  return element;
}

function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** The visible text of a token: spaces at its ends and line breaks are marked. */
function tokenText(id) {
  const text = DATA.names[id] ?? '';
  return text
    .replace(/^ +| +$/g, (spaces) => '␣'.repeat(spaces.length))
    .replace(/\n/g, '↵')
    .replace(/\t/g, '⇥')
    .replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069]/g, '\ufffd');
}

function quoted(id) {
  return `“${tokenText(id)}”`;
}

/** The token of a node of a round; -1 for a node that could not be drawn. */
function tokenOf(round, node) {
  return node ? round.tokens[node - 1] : round.root;
}

/** A number with three digits, or `few` digits if it is tiny. The leading zero of a probability is omitted. */
function number(value, few = 1) {
  if (value === null || value === undefined) return '–';
  if (value === 0) return '0';
  if (value >= 1000) return value.toExponential(1);
  if (value >= 100) return value.toFixed(0);
  if (value >= 10) return value.toFixed(1);
  if (value > 0.99949 && value < 1.0005) return value >= 1 ? (value === 1 ? '1' : '1.00') : '.999…';
  if (value >= 1) return value.toFixed(2);
  if (value < 0.0005) return value.toExponential(few - 1).replace('e-', 'e−');
  return value.toFixed(3).slice(1);
}

function plural(count, one, many = `${one}s`) {
  return `${count} ${count === 1 ? one : many}`;
}

/** The nodes from depth 1 down to a node. */
function pathTo(node) {
  const path = [];
  for (; node; node = TREE.parents[node]) path.unshift(node);
  return path;
}

/** True if a decision is on all nodes with the same text, which share a part of the credit above them. */
function isOfContext(decision) {
  return decision.picked_share !== undefined || decision.mass !== undefined;
}
