// Scores per client and per class.

const TO_ANALYSE = "fedproto analyse";
const TO_RECORD = 'fedproto analyse, or train with [measure] what = ["clients"]';

const QUANTILES = [0.1, 0.25, 0.5, 0.75, 0.9];

function quantileAt(quantiles, share) {
  return quantiles[Math.round(share * (quantiles.length - 1))];
}

// A client quantity over the clients in order.
function quantileSpec(condition, quantiles, label, order, y) {
  return {
    label: `${label}, ${order}, ${titleOf(condition)}`,
    lines: withGrey(condition.family, condition.groups, page.metric.name).map(([group, grey]) => ({
      label: methodTitle(group), named: !grey.color, method: group.method, ...grey, y: quantiles(group), x: quantiles(group).map((_, index, all) => index / (all.length - 1)),
    })),
    x: { name: `clients, ${order}`, mark: (value) => `${Math.round(100 * value)} %`, say: (value) => formatPercent(value, 0) },
    y,
  };
}

page.sections.push({
  id: "clients",
  title: "Scores per client",
  short: "Clients",
  empty() {
    return page.data.groups.some((group) => group.fairness) ? null : ["Needs", TO_RECORD];
  },
  build(host) {
    host.append(
      make("p", { class: "hint" }, "Score on each client's own test samples; clients sorted from worst to best, all seeds together."),
      make("div", { id: "clients-panels" }));
  },
  has(group) { return group.fairness; },
  spec(condition) {
    const y = { name: "score of a client", share: true, mark: markAs({ percent: true }), say: formatPercent };
    return quantileSpec(condition, (group) => group.fairness.quantiles, "Score of clients", "worst to best", y);
  },
  rows() {
    return [["run", "clients", "seeds", "round", "mean", "worst_tenth", "at_zero", ...QUANTILES.map((share) => `quantile_${share}`)], ...page.shown.filter((group) => group.fairness).map(({ title, fairness }) => [
      title, fairness.clients, fairness.seeds, fairness.round, fairness.mean, fairness.worst, fairness.zero, ...QUANTILES.map((share) => quantileAt(fairness.quantiles, share))])];
  },
  draw(host) {
    showSpecs(host.querySelector("#clients-panels"), this.has, this.spec, 220);
  },
});

page.sections.push({
  id: "classes",
  title: "Scores per class",
  short: "Classes",
  empty() {
    return page.data.groups.some((group) => group.classes) ? null : ["Needs", TO_RECORD];
  },
  build(host) {
    host.append(make("p", { class: "hint" }), scrolling("classes-table", "Score of each class"));
  },
  rows() {
    return [["run", "class", "score"], ...page.shown.filter((group) => group.classes).flatMap((group) => Object.entries(group.classes).map(([name, value]) => [group.title, name, value]))];
  },
  draw(host) {
    const overlap = page.data.metric.includes("iou");
    host.querySelector(".hint").textContent = overlap
      ? "Intersection over union of each class, on the test samples of all clients."
      : "Accuracy on the test samples of each class, of all clients together.";
    const groups = page.shown.filter((group) => group.classes);
    const names = [...new Set(groups.flatMap((group) => Object.keys(group.classes)))];
    if (!names.length) host.querySelector(".hint").textContent = `None of the runs in view has them. To get them: ${TO_RECORD}.`;
    host.querySelector("#classes-table").replaceChildren(names.length ? tableOf(["run", ...names], groups.map((group) => [[swatch(group.method), "\u00a0", group.title], ...names.map((name) => formatPercent(group.classes[name]))])) : "");
  },
});
