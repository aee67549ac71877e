// How much a client counts, and why: against what it holds, and client by client over the rounds.

const HOLDINGS = { size: "training samples of a client", classes: "classes of a client" };
const ORDERS = { client: "client", size: "clients, most samples first", classes: "clients, most classes first" };

function timesUniform(value) {
  return `${formatNumber(Number(value.toPrecision(3)))} ×`;
}

function heldBy() {
  return HOLDINGS[page.state.by] ? page.state.by : "size";
}

// A quantity of clients against what they hold, seeds pooled: bins of [holding, mean, quartiles, clients].
function holdingSpec(condition, bins, y, label) {
  const by = heldBy();
  const lines = condition.groups.map((group) => {
    const found = bins(group)[by];
    return {
      label: methodTitle(group), method: group.method, dots: true, x: found.map((bin) => bin[0]), y: found.map((bin) => bin[1]),
      say: (index) => `${y.say(found[index][1])} (middle half ${y.say(found[index][2])} to ${y.say(found[index][3])}, ${found[index][4]} clients)`,
    };
  });
  const [low, high] = extent(lines.map((line) => line.x));
  return {
    key: `${label} ${by} ${condition.family}`, label: `${label} against ${HOLDINGS[by]}, ${titleOf(condition)}`, lines, guides: y.guide === undefined ? [] : [[low, y.guide, high, y.guide]],
    x: { name: HOLDINGS[by], log: by === "size" && low > 0 && high / low > 20 ? 10 : false, whole: true }, y,
  };
}

function byChooser(id) {
  return chooser(id, "against", "by", [["size", "samples of a client"], ["classes", "classes of a client"]]);
}

page.sections.push({
  id: "attention",
  title: "Attention: how much a client counts",
  short: "Attention",
  empty() {
    return page.data.groups.some((group) => group.attention) ? null : ["No round averaged the updates of two or more clients.", null];
  },
  build(host) {
    host.append(
      make("p", { class: "hint" }, "The weight of a client's update in the average, in multiples of a uniform share: 1 × means that it counts like every other client of its cohort."),
      make("div", { class: "controls" }, byChooser("attention-by")),
      make("div", { id: "attention-panels" }),
      make("div", { class: "controls", id: "map-controls" }, chooser("attention-run", "Map of", "map"), chooser("attention-order", "sorted by", "order")),
      make("div", { class: "chart", id: "attention-chart" }), make("p", { class: "hint", id: "attention-note" }));
  },
  has(group) { return group.attention?.[heldBy()].length; },
  spec(condition) {
    return holdingSpec(condition, (group) => group.attention, { name: "weight ÷ uniform share", mark: timesUniform, say: timesUniform, log: 2, guide: 1 }, "Mean weight");
  },
  rows() {
    return [["condition", "method", "by", "holding", "mean_weight_over_uniform", "lower_quartile", "upper_quartile", "clients"],
      ...page.conditions.flatMap((condition) => condition.groups.flatMap((group) => ["size", "classes"].flatMap((by) => (group.attention?.[by] || []).map((bin) => [titleOf(condition), methodTitle(group), by, ...bin]))))];
  },
  map() {
    const having = page.shown.filter((group) => group.attention?.maps.client);
    if (!having.length) return null;
    const group = having.find((one) => one.title === page.state.map) || having.find((one) => /proto/i.test(one.title)) || having[0];
    const order = group.attention.maps[page.state.order] ? page.state.order : "client";
    const grid = group.attention.maps[order];
    const powers = marks(grid.low, grid.high, 6).map((power) => [(power - grid.low) / (grid.high - grid.low), timesUniform(2 ** power)]);
    const whole = [];
    for (let power = Math.ceil(grid.low); power <= grid.high; power++) whole.push([(power - grid.low) / (grid.high - grid.low), timesUniform(2 ** power)]);
    return { having, group, order, grid, spec: {
      label: `Attention of ${grid.total_rows} clients over ${grid.total_columns} rounds, ${group.title}`, color: diverging,
      ticks: whole.length >= 3 ? whole : powers, scaleName: "the uniform share", rowName: ORDERS[order], columnName: "round", firstColumn: 1,
      describe: (row, column, share) => {
        const who = `${order === "client" ? "client" : "place"} ${spanText(row, grid.row_span, grid.total_rows, 0)}, round ${spanText(column, grid.column_span, grid.total_columns, 1)}`;
        return share === null ? `${who}: did not take part` : `${who}: ${timesUniform(2 ** (grid.low + share * (grid.high - grid.low)))} the uniform share`;
      },
    } };
  },
  drawings() {
    const map = this.map();
    return [...allDrawings(this.has, this.spec, 220), ...(map ? [{ title: map.group.title, draw: (width) => heatDrawing(map.grid, map.spec, width) }] : [])];
  },
  draw(host) {
    const drawn = showSpecs(host.querySelector("#attention-panels"), this.has, this.spec, 220);
    host.querySelector("#attention-by").value = heldBy();
    host.querySelector(".controls").hidden = drawn === 0;
    const map = this.map();
    const note = host.querySelector("#attention-note");
    for (const part of ["#map-controls", "#attention-chart"]) host.querySelector(part).hidden = !map;
    const without = drawn ? "" : "What clients hold is not known here, so their weights are not shown against it (the data was not there or --no-data was given). ";
    if (!map) {
      note.textContent = `${without}All methods in view weigh the clients of a cohort alike.`;
      return;
    }
    syncOptions(host.querySelector("#attention-run"), map.having.map((group) => [group.title, group.title]), map.group.title);
    syncOptions(host.querySelector("#attention-order"), Object.keys(map.group.attention.maps).map((order) => [order, { client: "number", size: "samples", classes: "classes" }[order]]), map.order);
    heatMap(host.querySelector("#attention-chart"), map.grid, map.spec);
    const joined = [map.grid.row_span > 1 ? `${map.grid.row_span} clients` : null, map.grid.column_span > 1 ? `${map.grid.column_span} rounds` : null].filter(Boolean).join(" and ");
    note.textContent = `${without}Of the first seed. Colours are even steps of a factor. Empty: did not take part.${joined ? ` Each cell is the geometric mean over ${joined}.` : ""}`;
  },
});
