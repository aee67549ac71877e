// Small multiples: one chart per condition, side by side; many of them only when asked for.

const MOST_PANELS = 6;

// shown: [{ title, spec, height }], of `total` that there are.
function showPanels(host, shown, total) {
  host.classList.add("panels");
  host.classList.toggle("single", shown.length === 1);
  while (host.children.length > shown.length) host.lastChild.remove();
  while (host.children.length < shown.length) {
    host.append(make("figure", { class: "panel" }, make("figcaption", {}), make("div", { class: "body" })));
  }
  // All widths first: reading one after changing another would lay out the page each time.
  const widths = [...host.children].map((panel) => widthOf(panel.lastChild));
  shown.forEach((drawing, index) => {
    const [caption, body] = host.children[index].children;
    caption.textContent = drawing.title;
    caption.hidden = !drawing.title || total === 1;
    showChart(body, drawing.spec, widths[index], drawing.height);
  });
  showMore(host, total - shown.length);
}

function showMore(host, left) {
  if (!host.more) {
    host.more = make("button", { type: "button", class: "more", onclick: () => change({ all: !page.state.all }) });
    host.after(host.more);
  }
  const total = left + host.children.length;
  host.more.hidden = total <= MOST_PANELS;
  host.more.textContent = left ? `Show all ${total} conditions` : `Show only ${MOST_PANELS} conditions`;
}

// The conditions in view with a group that has something to show; `all` for a file, else a few.
function having(has, all) {
  const found = page.conditions.map((condition) => ({ ...condition, groups: condition.groups.filter(has) })).filter((condition) => condition.groups.length);
  return { total: found.length, shown: all || page.state.all ? found : found.slice(0, MOST_PANELS) };
}

// Shows one chart per condition.
function showSpecs(host, has, specOf, height) {
  const { total, shown } = having(has, false);
  const tall = total === 1 ? Math.max(height, 320) : height;
  showPanels(host, shown.map((condition) => ({ title: titleOf(condition), spec: specOf(condition), height: tall })), total);
  return total;
}
