'use strict';
// Acceptance of one token from n independent candidates by each rule: spectr_jax.theory in JavaScript, in doubles.
// The sandbox's sliders choose any two distributions, so that no table made in Python could hold the values. The test
// test_the_sandbox_computes_what_the_theory_does compares every function here with the library.

const RULES = (() => {
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const anyAccepted = (beta, n) => -Math.expm1(n * Math.log1p(-Math.min(beta, 1)));
  const overlap = (p, q, gamma) => sum(p.map((value, x) => Math.min(value, q[x] / gamma)));

  /** The acceptance of one candidate coupled maximally: 1 - TV(p, q). */
  function speculative(p, q) {
    return overlap(p, q, 1);
  }

  /** The acceptance of recursive rejection with replacement. */
  function specinfer(p, q, n) {
    let rejected = 1;
    let residual = q;
    for (let i = 0; i < n; i++) {
      rejected *= 1 - overlap(p, residual, 1);
      const left = residual.map((value, x) => Math.max(value - p[x], 0));
      const mass = sum(left);
      if (mass > 0) residual = left.map((value) => value / mass);
    }
    return 1 - rejected;
  }

  /** The threshold of K-SEQ: the root in [1, n] of 1 - (1 - beta)^n = gamma beta(gamma), from above. */
  function gamma(p, q, n) {
    const excess = (g) => anyAccepted(overlap(p, q, g), n) - g * overlap(p, q, g);
    let [low, high] = [1, n];
    if (excess(1) <= 0) return 1;
    for (let i = 0; i < 60; i++) {
      const middle = (low + high) / 2;
      if (excess(middle) > 0) low = middle;
      else high = middle;
    }
    return high;
  }

  function kseq(p, q, n) {
    return anyAccepted(overlap(p, q, gamma(p, q, n)), n);
  }

  /** The optimum: the minimum of 1 + q(A) - p(A)^n over prefixes A of the tokens in ascending order of q/p. */
  function optimum(p, q, n) {
    const order = p.map((_, x) => x).sort((x, y) => (p[x] > 0 ? q[x] / p[x] : Infinity) - (p[y] > 0 ? q[y] / p[y] : Infinity));
    let [best, inside, below] = [1, 0, 0];
    for (const x of order) {
      inside += q[x];
      below += p[x];
      best = Math.min(best, 1 + inside - Math.min(below, 1) ** n);
    }
    return Math.max(best, 0);
  }

  const CLASSES = 40;
  const bits = new Int32Array(1);
  const float = new Float32Array(bits.buffer);

  /** The class of q/p, four per octave from 1/23 upwards, by the leading bits of a float32. */
  function classOf(p, q) {
    const leading = (value) => {
      float[0] = value;
      return bits[0] >> 21;
    };
    const ratio = Math.fround(Math.fround(q) / Math.max(Math.fround(p), 1.17549435e-38));
    return Math.max(0, Math.min(CLASSES - 1, leading(ratio) - leading(1 / 23)));
  }

  /** The best distribution of the picked class, the classes that win, and the draft's mass of the others. */
  function raceGoal(p, q, n) {
    let [below, inside, tightest] = [0, 0, 0];
    const excess = p.map((mass, c) => {
      below += mass;
      inside += q[c];
      return Math.max(Math.min(below, 1) ** n - inside, 0);
    });
    excess.forEach((value, c) => {
      if (value > excess[tightest]) tightest = c;
    });
    const reserved = [...excess];
    for (let c = 1; c <= tightest; c++) reserved[c] = Math.max(reserved[c], reserved[c - 1]);
    for (let c = CLASSES - 2; c > tightest; c--) reserved[c] = Math.max(reserved[c], reserved[c + 1]);
    const isExcess = excess[tightest] > 0;
    return {
      law: q.map((mass, c) => Math.max(0, Math.min(mass + reserved[c] - (c ? reserved[c - 1] : 0), anyAccepted(p[c], n)))),
      isHigh: p.map((_, c) => !isExcess || c > tightest),
      lowMass: isExcess ? sum(p.slice(0, tightest + 1)) : 0,
    };
  }

  /** The distribution of the token that a race picks, with weights fitted as in `spectr_jax.couplings.Race`. */
  function racedLaw(p, q, n) {
    if (n === 1) return p;
    const classes = p.map((value, x) => classOf(value, q[x]));
    const massesOf = (law) => {
      const masses = new Array(CLASSES).fill(0);
      law.forEach((value, x) => (masses[classes[x]] += value));
      return masses;
    };
    const [mass, targetMass] = [massesOf(p), massesOf(q)];
    const goal = raceGoal(mass, targetMass, n);
    const possible = mass.map((value, c) => (value > 0 ? c : -1)).filter((c) => c >= 0);
    const [logRange, step, pad, count] = [12, 1.4, 32, 160];
    const spacing = (logRange + 3.5 + pad) / (count - 1);
    const nodes = Array.from({length: count}, (_, i) => Math.exp(-pad + i * spacing));
    const widths = nodes.map((node, i) => node * spacing * (i === 0 || i === count - 1 ? 0.5 : 1));
    widths[0] += nodes[0];

    const winner = (logWeights) => {
      const law = new Array(CLASSES).fill(0);
      const weights = logWeights.map(Math.exp);
      nodes.forEach((z, i) => {
        const decay = weights.map((weight) => Math.exp(-weight * z));
        const phi = [goal.lowMass, 0];
        for (const c of possible) phi[goal.isHigh[c] ? 0 : 1] += mass[c] * decay[c];
        const others = phi.map((value) => Math.max(value, 1e-300) ** (n - 1) * widths[i]);
        for (const c of possible) law[c] += n * mass[c] * weights[c] * others[goal.isHigh[c] ? 0 : 1] * decay[c];
      });
      return law;
    };

    let logWeights = new Array(CLASSES).fill(0);
    for (let round = 0; round < 6; round++) {
      const found = winner(logWeights);
      const moved = logWeights.map((value, c) =>
        mass[c] > 0 ? value + step * (Math.log(Math.max(goal.law[c], 1e-30)) - Math.log(Math.max(found[c], 1e-30))) : -Infinity);
      const largest = [true, false].map((side) => Math.max(...moved.filter((_, c) => goal.isHigh[c] === side)));
      logWeights = moved.map((value, c) => {
        const top = largest[goal.isHigh[c] ? 0 : 1];
        return Math.max(value - (Number.isFinite(top) ? top : 0), -logRange);
      });
    }
    const law = winner(logWeights);
    return p.map((value, x) => (value > 0 ? (value * law[classes[x]]) / mass[classes[x]] : 0));
  }

  function race(p, q, n) {
    return overlap(racedLaw(p, q, n), q, 1);
  }

  return {speculative, specinfer, gamma, kseq, race, optimum};
})();
