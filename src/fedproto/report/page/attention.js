// The clients' weights, against their samples and classes.

const HOLDINGS = { size: "training samples of a client", classes: "classes of a client" };

function timesUniform(value) {
  return `${formatNumber(Number(value.toPrecision(3)))} ×`;
}

function heldBy() {
  return HOLDINGS[page.state.by] ? page.state.by : "size";
}

// A client quantity against the clients' samples or classes, seeds pooled: bins of [holding, mean, quartiles, clients].
function holdingSpec(condition, bins, y, label) {
  const by = heldBy();
  const lines = withGrey(condition.family, condition.groups, page.metric.name).map(([group, grey]) => {
    const found = bins(group)[by];
    return {
      label: methodTitle(group), named: !grey.color, method: group.method, dots: true, ...grey, x: found.map((bin) => bin[0]), y: found.map((bin) => bin[1]),
      say: (index) => `${y.say(found[index][1])} (middle half ${y.say(found[index][2])} to ${y.say(found[index][3])}, ${found[index][4]} clients)`,
    };
  });
  const [low, high] = extent(lines.map((line) => line.x));
  return {
    label: `${label} against ${HOLDINGS[by]}, ${titleOf(condition)}`, lines, guides: y.guide === undefined ? [] : [[low, y.guide, high, y.guide]],
    x: { name: HOLDINGS[by], log: by === "size" && low > 0 && high / low > 20 ? 10 : false, whole: true }, y,
  };
}

function byChooser(id) {
  return chooser(id, "against", "by", [["size", "samples of a client"], ["classes", "classes of a client"]]);
}

page.sections.push({
  id: "attention",
  title: "Attention: the weight of a client",
  short: "Attention",
  empty() {
    if (!page.data.groups.some((group) => group.attention)) return ["No round averaged the updates of two or more clients.", null];
    return page.data.groups.some((group) => group.attention?.size.length) ? null : ["Needs the data, which could not be loaded or was left out by --no-data.", null];
  },
  build(host) {
    host.append(
      make("p", { class: "hint" }, "The weight of a client's update in the average, in multiples of a uniform share: 1 × is the weight under plain averaging."),
      make("div", { class: "controls" }, byChooser("attention-by")),
      make("div", { id: "attention-panels" }), make("p", { class: "hint", id: "attention-note" }));
  },
  has(group) { return group.attention?.[heldBy()].length; },
  spec(condition) {
    return holdingSpec(condition, (group) => group.attention, { name: "weight ÷ uniform share", mark: timesUniform, say: timesUniform, log: 2, guide: 1 }, "Mean weight");
  },
  rows() {
    return [["condition", "method", "by", "holding", "mean_weight_over_uniform", "lower_quartile", "upper_quartile", "clients"],
      ...page.conditions.flatMap((condition) => condition.groups.flatMap((group) => ["size", "classes"].flatMap((by) => (group.attention?.[by] || []).map((bin) => [titleOf(condition), methodTitle(group), by, ...bin]))))];
  },
  draw(host) {
    const drawn = showSpecs(host.querySelector("#attention-panels"), this.has, this.spec, 220);
    host.querySelector("#attention-by").value = heldBy();
    host.querySelector(".controls").hidden = drawn === 0;
    host.querySelector("#attention-note").textContent = drawn ? "" : "None of the runs in view has its data here.";
  },
});
