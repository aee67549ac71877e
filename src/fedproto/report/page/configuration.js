// The configuration of every group beside the others, and what each run was computed with.

function valueText(value) {
  if (value === undefined) return "–";
  return typeof value === "string" ? value || "–" : JSON.stringify(value);
}

page.sections.push({
  id: "configuration",
  title: "Configuration",
  build(host) {
    host.append(
      make("div", { class: "controls" }, make("label", {}, make("input", {
        id: "only-differences", type: "checkbox", checked: page.state.onlyDifferences,
        onchange: (event) => { page.state.onlyDifferences = event.target.checked; this.draw(host); },
      }), "only what differs between runs")),
      make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Configuration" }, make("table", { class: "words", id: "configuration-table" })),
      make("h3", {}, "Runs"),
      make("div", { id: "run-list" }));
  },
  draw(host) {
    const groups = page.data.groups;
    const names = [...new Set(groups.flatMap((group) => Object.keys(group.config)))].filter((name) => !["seed", "label"].includes(name));
    const differs = (name) => new Set(groups.map((group) => valueText(group.config[name]))).size > 1;
    const only = page.state.onlyDifferences && groups.length > 1;
    host.querySelector(".controls").hidden = groups.length < 2;
    const rows = names.filter((name) => !only || differs(name)).map((name) => make("tr", {},
      make("th", { scope: "row" }, make("code", {}, name)),
      groups.map((group) => make("td", { class: !only && groups.length > 1 && differs(name) ? "differs" : null }, valueText(group.config[name])))));
    host.querySelector("table").replaceChildren(
      make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "option"), groups.map((group, place) => make("th", { scope: "col" }, swatch(place), " ", group.title)))),
      make("tbody", {}, rows.length ? rows : make("tr", {}, make("td", { colspan: groups.length + 1 }, "Nothing but labels and seeds differs."))));
    const list = host.querySelector("#run-list");
    const open = new Set([...list.querySelectorAll("details[open]")].map((one) => one.dataset.path));
    list.replaceChildren(...page.data.runs.map((run) => runDetails(run, open.has(run.path))));
  },
});

function runDetails(run, open) {
  const facts = [
    ["directory", run.path],
    ["rounds", `${run.rounds} of ${run.planned}; ${run.ended || "not finished"}`],
    ["time", formatSeconds(run.seconds)],
    ["failed updates", String(run.failures)],
    ...Object.entries(run.environment),
  ];
  const notes = [...run.notes, ...(run.more_notes ? [`and ${run.more_notes} more`] : [])];
  if (notes.length) facts.push(["notes", notes.join("; ")]);
  return make("details", { open, "data-path": run.path },
    make("summary", {}, `${runTitle(run)}: ${run.ended || `${run.rounds} of ${run.planned} rounds`}`),
    make("dl", {}, facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])));
}
