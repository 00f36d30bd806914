'use strict';
// The closed form of speculative decoding: tokens per call of the target, the cost of a round, and the speed-up.

const SPEED = (() => {
  /** Tokens per call of one draft of L tokens, each accepted with probability a if all before it were. */
  function chainTokens(a, length) {
    return a >= 1 ? length + 1 : -Math.expm1((length + 1) * Math.log(a)) / (1 - a);
  }

  /** The acceptance of any of K candidates if each had its own chance a. An approximation: see the page. */
  function anyOf(a, numDrafts) {
    return 1 - (1 - a) ** numDrafts;
  }

  /** The cost of a round of L steps of the draft and a call on N guesses, in calls of the target on one token. */
  function roundCost(length, numGuesses, draftCost, guessCost) {
    return 1 + length * draftCost + numGuesses * guessCost;
  }

  function speedUp({a, numDrafts, length, draftCost, guessCost}) {
    return chainTokens(anyOf(a, numDrafts), length) / roundCost(length, numDrafts * length, draftCost, guessCost);
  }

  /** The length from 1 to `most` with the largest speed-up. */
  function bestLength(setting, most) {
    let best = 1;
    for (let length = 2; length <= most; length++) {
      if (speedUp({...setting, length}) > speedUp({...setting, length: best})) best = length;
    }
    return best;
  }

  /** The constant acceptance at which one draft of L tokens yields so many tokens per call. */
  function acceptanceOf(tokens, length) {
    let [low, high] = [0, 1];
    for (let i = 0; i < 50; i++) {
      const middle = (low + high) / 2;
      if (chainTokens(middle, length) < tokens) low = middle;
      else high = middle;
    }
    return (low + high) / 2;
  }

  return {chainTokens, anyOf, roundCost, speedUp, bestLength, acceptanceOf};
})();
