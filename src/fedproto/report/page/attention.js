// The clients' weights in the average.

function timesUniform(value) {
  return `${formatNumber(Number(value.toPrecision(3)))} ×`;
}

page.sections.push({
  id: "attention",
  title: "Attention: the weight of a client",
  short: "Attention",
  empty() {
    return page.data.groups.some((group) => group.attention) ? null : ["No round averaged the updates of two or more clients.", null];
  },
  build(host) {
    host.append(
      make("p", { class: "hint" }, "The mean weight of a client's updates in the average, in multiples of a uniform share: 1 × is the weight under plain averaging. Clients are sorted by it, all seeds together."),
      make("div", { id: "attention-panels" }));
  },
  has(group) { return group.attention; },
  spec(condition) {
    const y = { name: "weight ÷ uniform share", mark: timesUniform, say: timesUniform };
    return { ...quantileSpec(condition, (group) => group.attention.quantiles, "Mean weight of clients", "lowest to highest", y), guides: [[0, 1, 1, 1]] };
  },
  rows() {
    return [["run", ...QUANTILES.map((share) => `quantile_${share}`)], ...page.shown.filter(this.has).map((group) => [
      group.title, ...QUANTILES.map((share) => quantileAt(group.attention.quantiles, share))])];
  },
  draw(host) {
    showSpecs(host.querySelector("#attention-panels"), this.has, this.spec, 220);
  },
});
