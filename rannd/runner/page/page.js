"use strict";
(() => {
const page = JSON.parse(document.getElementById("data").textContent);
const KINDS = ["forward", "backward", "weight gradients", "receive", "reduce", "send", "wait", "other"];
const SVG = "http://www.w3.org/2000/svg";
const find = (id) => document.getElementById(id);

// Texts come from anybody's model: they become text nodes, never HTML.
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, call] of Object.entries(value)) node.addEventListener(event, call);
    else if (value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== ""));
  return node;
}
function time(us) {
  if (us === 0) return "0";
  if (us < 1000) return `${us < 10 ? us.toFixed(2) : us.toFixed(1)} µs`;
  return us < 1e6 ? `${(us / 1e3).toFixed(us < 1e5 ? 2 : 1)} ms` : `${(us / 1e6).toFixed(3)} s`;
}
function scaled(count, units, step) {
  let place = 0;
  while (count >= step && place < units.length - 1) { count /= step; place += 1; }
  return `${place ? count.toFixed(count < 100 ? 2 : 1) : count} ${units[place]}`;
}
const bytes = (count) => scaled(count, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024);
const flops = (count) => (count ? scaled(count, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"], 1000) : "");
const percent = (part) => `${(100 * part).toFixed(1)} %`;
const signed = (part) => `${part >= 0 ? "+" : "−"}${Math.abs(100 * part).toFixed(1)} %`;
const number = (count) => count.toLocaleString("en");
const plural = (count, what) => `${number(count)} ${what}${count === 1 ? "" : "s"}`;

// A table; `numbers` are the places of right-aligned columns, a row may be {cells, mark}.
function table(caption, heads, rows, numbers = []) {
  const cell = (text, place, tag = "td") =>
    make(tag, { class: numbers.includes(place) ? "n" : "t", ...(tag === "th" ? { scope: "col" } : {}) }, text);
  const body = rows.map((row) => {
    const cells = Array.isArray(row) ? row : row.cells;
    return make("tr", { class: row.mark ? "mark" : false }, ...cells.map((text, place) => cell(text, place)));
  });
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    make("table", {}, make("caption", {}, caption),
      make("thead", {}, make("tr", {}, ...heads.map((text, place) => cell(text, place, "th")))),
      make("tbody", {}, ...body)));
}
function legend(entries) {
  return make("ul", { class: "legend" },
    ...entries.map(([cls, text]) => make("li", {}, make("i", { class: cls, "aria-hidden": "true" }), text)));
}
function card(title, large, ...lines) {
  return make("div", { class: "card" }, make("h3", {}, title), make("div", { class: "large" }, large),
    ...lines.filter(Boolean).map((line) => (line instanceof Node ? line : make("p", {}, line))));
}

function drawVerdict() {
  const section = find("verdict"), v = page.verdict;
  const cards = make("div", { class: "cards" });
  cards.append(card("Step, predicted", time(v.step_us), `${percent(v.bubble)} of all devices' time is not computing`));
  if (v.measured_us)
    cards.append(card("Step, measured", time(v.measured_us), `median of ${plural(v.measured_steps, "step")}, `
      + `${signed(v.measured_us / v.step_us - 1)} against what was predicted`));
  cards.append(card("E, by the closed form", v.closed_us ? time(v.closed_us) : "not known", v.certificate));
  const most = Math.max(...page.memory.map((each) => each.used));
  cards.append(card("Fullest device", bytes(most),
    page.memory_limit ? `${percent(most / page.memory_limit)} of ${bytes(page.memory_limit)} that a plan may use` : ""));
  cards.append(v.runner
    ? card("Runner-up", make("span", { class: "named" }, v.runner.name), `${v.runner.at_least ? "at least " : ""}${time(v.runner.step_us)}`, v.runner.why)
    : card("Runner-up", "none", v.others.length ? "No other plan that was kept fits."
      : "No other plan was compared, or none with other stages was as promising."));
  section.append(cards);
  if (v.reasons.length)
    section.append(make("h3", {}, "Why"), table("What was chosen, and why", ["what", "chosen", "why"], v.reasons));
  if (v.others.length)
    section.append(make("h3", {}, "Not chosen"), table("Plans that were not chosen",
      ["plan", "step", "fullest device", "why"],
      v.others.map((each) => [each.name, each.step_us ? `${each.at_least ? "≥ " : ""}${time(each.step_us)}` : "",
        bytes(each.most_bytes), each.why]), [1, 2]));
  section.append(make("details", {}, make("summary", {}, "What it was planned for"),
    table("What it was planned for", ["", ""], v.facts)));
}

function bar(parts, whole, marks = []) {
  const node = make("div", { class: "bar", "aria-hidden": "true" });
  for (const [cls, size] of parts) {
    const part = make("i", { class: cls });
    part.style.width = `${Math.max(100 * size / whole, 0)}%`;
    node.append(part);
  }
  for (const [cls, at] of marks) {
    const mark = make("b", { class: cls });
    mark.style.left = `calc(${Math.min(100 * at / whole, 100)}% - 3px)`;
    node.append(mark);
  }
  return node;
}
const barRow = (name, drawn, value) => make("div", { class: "row", role: "listitem" },
  make("span", { class: "name" }, name), drawn, make("span", { class: "value" }, value));

function drawCosts() {
  const section = find("costs");
  if (page.uses.length) {
    const critical = page.uses.find((each) => each.critical);
    const step = critical.forward_us + critical.backward_us + critical.reduce_us + critical.idle_us;
    section.append(make("p", {}, `${critical.count > 1 ? "Devices" : "Device"} ${critical.devices}, `
      + `${critical.stages.includes(",") ? "stages" : "stage"} ${critical.stages}, ${critical.count > 1 ? "compute" : "computes"} longest: `
      + `${time(critical.forward_us + critical.backward_us)} of ${time(step)}. With this plan and these costs a step cannot be shorter than that; `
      + "less work there, or less waiting, makes it shorter."));
    section.append(legend([["c0", "forward"], ["c1", "backward"], ["c4", "reductions, alone"], ["c6", "waiting, transfers, the runtime"]]));
    section.append(make("div", { class: "bars", role: "list", "aria-label": "What devices spend the step for" },
      ...page.uses.map((each) => {
        const parts = [["c0", each.forward_us], ["c1", each.backward_us], ["c4", each.reduce_us], ["c6", each.idle_us]];
        const whole = parts.reduce((sum, part) => sum + part[1], 0);
        return barRow(`${each.devices}, stage ${each.stages}${each.critical ? " ★ critical" : ""}`, bar(parts, whole || 1),
          `computes ${percent((each.forward_us + each.backward_us) / (whole || 1))}`);
      })));
  } else section.append(make("p", { class: "faint" }, page.timeline_note));
  section.append(make("h3", {}, "Largest costs of a step, on one device"));
  const most = page.costs.length ? page.costs[0].us : 1;
  section.append(make("div", { class: "bars", role: "list", "aria-label": "Largest costs" },
    ...page.costs.map((each) => {
      const kind = each.what.startsWith("forward") ? "c0" : each.what.startsWith("backward") ? "c1"
        : each.what.startsWith("reduction") ? "c4" : "c3";
      const name = make("span", {}, each.what, make("span", { class: "faint small" }, each.detail ? ` ${each.detail}` : ""));
      return barRow(name, bar([[kind, each.us]], most), time(each.us));
    })));
}

function drawMemory() {
  const section = find("memory");
  const sums = page.memory.map((each) => each.parts.reduce((sum, part) => sum + part, 0));
  const largest = Math.max(...page.memory.map((each) => each.used), ...sums, 1);
  const near = page.memory_limit && page.memory_limit <= 3 * largest;
  const whole = near ? Math.max(largest, page.memory_limit) : largest;
  section.append(make("p", { class: "small faint" }, "Parts are maxima, each at a moment of its own; the line across is the most "
    + "that is in use at a time, which is what counts against the limit"
    + (page.memory_limit ? ` of ${bytes(page.memory_limit)} per device${near ? "" : ", far to the right of these bars"}.` : ".")));
  section.append(legend([...page.memory_names.map((name, place) => [`m${place}`, name]), ["ink thin", "in use at a time"],
    ...(near ? [["limit thin", "limit"]] : [])]));
  section.append(make("div", { class: "bars", role: "list", "aria-label": "Memory of the devices" },
    ...page.memory.map((each) => barRow(`${each.devices}, stage ${each.stages}${each.count > 1 ? ` (${each.count} devices)` : ""}`,
      bar(each.parts.map((part, place) => [`m${place}`, part]), whole,
        [["", each.used], ...(near ? [["limit", page.memory_limit]] : [])]),
      bytes(each.used) + (page.memory_limit ? `, ${percent(each.used / page.memory_limit)}` : "")))));
  section.append(make("details", {}, make("summary", {}, "Numbers"),
    table("Planned memory of a device", ["devices", "stages", ...page.memory_names, "in use at a time"],
      page.memory.map((each) => [each.devices, each.stages, ...each.parts.map(bytes), bytes(each.used)]),
      page.memory_names.map((_, place) => place + 2).concat(page.memory_names.length + 2))));
}

function drawTimeline() {
  const section = find("timeline");
  if (page.timeline_note) section.append(make("p", { class: "faint" }, page.timeline_note));
  if (!page.timelines.length) return;
  const whole = 1.01 * Math.max(...page.timelines.map((each) => Math.max(each.step_us,
    each.unit_us * each.events.start.reduce((most, start, place) => Math.max(most, start + each.events.length[place]), 0))));
  const view = { from: 0, to: whole };
  const told = make("p", { class: "told", role: "status", "aria-live": "polite" }, "Point at an event, or focus a timeline and use the arrow keys.");
  const rows = [];
  const zoom = (factor, at = (view.from + view.to) / 2) => {
    const span = Math.min(Math.max((view.to - view.from) * factor, whole / 20000), whole);
    const share = (at - view.from) / (view.to - view.from);
    view.from = Math.min(Math.max(at - share * span, 0), whole - span);
    view.to = view.from + span;
    draw();
  };
  const pan = (part) => {
    const span = view.to - view.from;
    view.from = Math.min(Math.max(view.from + part * span, 0), whole - span);
    view.to = view.from + span;
    draw();
  };
  const button = (text, label, call) => make("button", { type: "button", "aria-label": label, on: { click: call } }, text);
  section.append(make("div", { class: "tools", role: "group", "aria-label": "Zoom of the timelines" },
    button("+", "Zoom in", () => zoom(0.5)), button("−", "Zoom out", () => zoom(2)),
    button("◀", "Earlier", () => pan(-0.4)), button("▶", "Later", () => pan(0.4)),
    button("All", "Whole step", () => zoom(1e9)),
    make("span", { class: "small faint", id: "range" }, "")));
  section.append(make("p", { class: "small faint" }, "Drag to move, Ctrl and the wheel to zoom. Keys: arrows go from event to event "
    + "and from device to device, + and − zoom, 0 shows all. Simulated forwards and backwards are drawn with what the runtime takes "
    + "for each and for its messages, which counts as not computing above."));
  section.append(legend(KINDS.slice(0, 7).map((name, place) => [`c${place}`, name])));
  const style = () => {
    const all = getComputedStyle(document.documentElement);
    return (name) => all.getPropertyValue(name).trim();
  };
  const HEIGHT = 30, HEAD = 20;
  for (const line of page.timelines) {
    const head = `${line.title}${line.what ? `: ${line.what}` : ""}, ${time(line.step_us)}`
      + `${line.typical ? ` (${line.typical.what}: ${time(line.typical.step_us)})` : ""}`;
    const canvas = make("canvas", { tabindex: "0", role: "img",
      "aria-label": `${head}; ${plural(line.slots.length, "device")}. Arrow keys select events.` });
    rows.push({ line, canvas, picked: -1 });
    section.append(make("h3", {}, head),
      line.note ? make("p", { class: "small faint" }, line.note) : "", canvas);
  }
  // The same beside the event, as the line below the timelines may be out of the window.
  const tip = make("div", { class: "tip", "aria-hidden": "true", hidden: true });
  const tell = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    tip.style.left = `${Math.max(Math.min(x + 12, document.documentElement.clientWidth - tip.offsetWidth - 8), 8)}px`;
    tip.style.top = `${scrollY + (y + 22 + tip.offsetHeight > innerHeight ? y - 12 - tip.offsetHeight : y + 18)}px`;
  };
  section.append(told, tip);
  const label = (line) => (innerWidth < 600 ? 46 : Math.min(170, 20 + 7 * Math.max(...line.slots.map((each) => each.length))));
  const describe = (row, place) => {
    const { line } = row, e = line.events;
    const start = e.start[place] * line.unit_us, length = e.length[place] * line.unit_us;
    return `${line.title}: ${e.names[e.name[place]]} (${KINDS[e.kind[place]]}) on ${line.slots[e.slot[place]]}, `
      + `from ${time(start)} to ${time(start + length)}: ${time(length)}`;
  };
  function draw() {
    const color = style(), dark = matchMedia("(prefers-color-scheme: dark)").matches;
    for (const row of rows) {
      const { canvas, line } = row, e = line.events;
      const width = canvas.clientWidth || 800, height = HEAD + HEIGHT * line.slots.length + 4;
      const ratio = devicePixelRatio || 1;
      canvas.style.height = `${height}px`;
      canvas.width = width * ratio;
      canvas.height = height * ratio;
      const pen = canvas.getContext("2d");
      pen.scale(ratio, ratio);
      pen.clearRect(0, 0, width, height);
      const left = label(line), span = view.to - view.from, per = (width - left) / span;
      pen.font = "11px ui-monospace, 'DejaVu Sans Mono', monospace";
      pen.textBaseline = "middle";
      const ticks = Math.max(Math.floor((width - left) / 110), 1);
      const size = 10 ** Math.floor(Math.log10(span / ticks));
      const step = [1, 2, 5, 10].map((each) => each * size).find((each) => span / each <= ticks) || 10 * size;
      for (let at = Math.ceil(view.from / step) * step; at <= view.to; at += step) {
        const x = left + (at - view.from) * per;
        pen.fillStyle = color("--line");
        pen.fillRect(x, HEAD, 1, height);
        pen.fillStyle = color("--faint");
        const text = time(Math.round(at * 1000) / 1000);
        if (x + 4 + pen.measureText(text).width < width) pen.fillText(text, x + 3, 10);
      }
      line.slots.forEach((name, place) => {
        const y = HEAD + HEIGHT * place;
        pen.fillStyle = color("--line");
        pen.fillRect(0, y, width, 1);
        pen.fillStyle = color("--ink");
        pen.fillText(innerWidth < 600 ? name.split(" ")[0] : name, 6, y + HEIGHT / 2, left - 8);
      });
      pen.save();
      pen.beginPath();
      pen.rect(left, HEAD, width - left, height);
      pen.clip();
      const colors = KINDS.map((_, place) => color(`--c${place}`));
      for (let place = 0; place < e.start.length; place += 1) {
        const x = left + (e.start[place] * line.unit_us - view.from) * per;
        const wide = Math.max(e.length[place] * line.unit_us * per, 0.7);
        if (x > width || x + wide < left) continue;
        const computes = e.kind[place] < 3;
        const y = HEAD + HEIGHT * e.slot[place] + (computes ? 3 : 22);
        pen.fillStyle = colors[e.kind[place]];
        pen.fillRect(x, y, wide > 3 ? wide - 0.6 : wide, computes ? 18 : 6);
        const text = e.names[e.name[place]];
        if (computes && wide > 8 + 7 * text.length) {
          pen.fillStyle = dark ? "#0c1116" : e.kind[place] === 1 ? "#1f1404" : "#fff";
          pen.fillText(text, Math.max(x, left) + 4, y + 9);
        }
        if (place === row.picked) {
          pen.strokeStyle = color("--ink");
          pen.lineWidth = 2;
          pen.strokeRect(x, y - 1, Math.max(wide, 2), computes ? 20 : 8);
        }
      }
      pen.fillStyle = color("--accent");
      pen.fillRect(left + (line.step_us - view.from) * per, HEAD, 1.5, height);
      pen.restore();
    }
    find("range").textContent = `${time(view.from)} to ${time(Math.min(view.to, whole))}`;
  }
  const pick = (row, place, show = false) => {
    for (const other of rows) other.picked = other === row ? place : -1;
    if (place >= 0) {
      told.textContent = describe(row, place);
      const begin = row.line.events.start[place] * row.line.unit_us;
      if (show && (begin < view.from || begin > view.to)) pan((begin - (view.from + view.to) / 2) / (view.to - view.from));
      if (show) {
        const box = row.canvas.getBoundingClientRect(), left = label(row.line);
        const x = left + (begin - view.from) * (box.width - left) / (view.to - view.from);
        tell(told.textContent, box.left + Math.max(x, left), box.top + HEAD + HEIGHT * row.line.events.slot[place] + 12);
      }
    }
    draw();
  };
  const under = (row, event) => {
    const box = row.canvas.getBoundingClientRect(), e = row.line.events, left = label(row.line);
    const x = event.clientX - box.left - left, y = event.clientY - box.top - HEAD;
    const slot = Math.floor(y / HEIGHT), below = y - slot * HEIGHT > 21;
    const per = (box.width - left) / (view.to - view.from), at = view.from + x / per, near = 2 / per;
    let best = -1;
    for (let place = 0; place < e.start.length; place += 1) {
      if (e.slot[place] !== slot || (e.kind[place] >= 3) !== below) continue;
      const start = e.start[place] * row.line.unit_us;
      if (at >= start - near && at <= start + e.length[place] * row.line.unit_us + near) best = place;
    }
    return x < 0 ? -1 : best;
  };
  for (const row of rows) {
    const { canvas, line } = row, e = line.events;
    let held = null;
    canvas.addEventListener("pointerdown", (event) => { held = event.clientX; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", () => { held = null; });
    canvas.addEventListener("pointermove", (event) => {
      if (held !== null && event.pointerType !== "touch" && event.buttons) {
        pan((held - event.clientX) / (canvas.clientWidth - label(line)));
        held = event.clientX;
        tip.hidden = true;
        return;
      }
      const place = under(row, event);
      if (place >= 0) tell(describe(row, place), event.clientX, event.clientY);
      else tip.hidden = true;
      if (place >= 0 && place !== row.picked) pick(row, place);
    });
    for (const left of ["pointerleave", "blur"]) canvas.addEventListener(left, () => { tip.hidden = true; });
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      const box = canvas.getBoundingClientRect(), left = label(line);
      const at = view.from + (event.clientX - box.left - left) / (box.width - left) * (view.to - view.from);
      zoom(event.deltaY > 0 ? 1.25 : 0.8, Math.min(Math.max(at, view.from), view.to));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const now = row.picked, count = e.start.length;
      const go = (slot) => {
        if (slot < 0 || slot >= line.slots.length) return now;
        const at = now < 0 ? view.from / line.unit_us : e.start[now];
        let best = -1;
        for (let place = 0; place < count; place += 1)
          if (e.slot[place] === slot && (best < 0 || Math.abs(e.start[place] - at) < Math.abs(e.start[best] - at))) best = place;
        return best < 0 ? now : best;
      };
      const calls = {
        ArrowRight: () => pick(row, Math.min(now + 1, count - 1), true),
        ArrowLeft: () => pick(row, Math.max(now - 1, 0), true),
        ArrowDown: () => pick(row, now < 0 ? 0 : go(e.slot[now] + 1), true),
        ArrowUp: () => pick(row, now < 0 ? 0 : go(e.slot[now] - 1), true),
        "+": () => zoom(0.5, now < 0 ? undefined : e.start[now] * line.unit_us),
        "=": () => zoom(0.5), "-": () => zoom(2), 0: () => zoom(1e9),
      };
      if (!calls[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      calls[event.key]();
    });
  }
  addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
}

function shape(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
const shortened = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

// Stages in a row, neighbours with straight arrows, edges that skip stages with arcs below.
function diagram() {
  const BOX = 168, GAP = 118, TALL = 66, back = page.edges.some((each) => each.dst === "the ranks");
  const names = ["the ranks", ...page.stages.map((_, place) => `stage ${place}`), ...(back ? ["the ranks"] : [])];
  const place = (text, last) => (text === "the ranks" ? (last ? names.length - 1 : 0) : Number(text.slice(6)) + 1);
  const skips = page.edges.filter((each) => place(each.dst, true) - place(each.src, false) > 1).length;
  const wide = names.length * BOX + (names.length - 1) * GAP + 4, tall = TALL + 30 + 34 * skips;
  const svg = shape("svg", { width: wide, height: tall, viewBox: `0 0 ${wide} ${tall}`, role: "img", "font-size": 12 });
  svg.append(shape("title", {}, "Stages, and what a microbatch sends between them"));
  const x = (at) => 2 + at * (BOX + GAP);
  const tip = (px, py, dx, dy) => shape("path", { d: `M${px} ${py} l${-7 * dx - 4 * dy} ${-7 * dy - 4 * dx} l${8 * dy} ${8 * dx} z`, fill: "currentColor" });
  let level = 0;
  for (const each of page.edges) {
    const from = place(each.src, false), to = place(each.dst, true);
    const there = `${bytes(each.values_bytes)}, ${time(each.values_us)}`;
    const back = each.grads_bytes ? `back ${bytes(each.grads_bytes)}` : "";
    if (to - from === 1) {
      const y = 2 + TALL / 2, begin = x(from) + BOX, end = x(to);
      svg.append(shape("path", { d: `M${begin} ${y} H${end}`, stroke: "currentColor", fill: "none" }), tip(end, y, 1, 0));
      svg.append(shape("text", { x: (begin + end) / 2, y: y - 7, "text-anchor": "middle", fill: "currentColor", "font-size": 10.5 }, there));
      svg.append(shape("text", { x: (begin + end) / 2, y: y + 15, "text-anchor": "middle", fill: "currentColor", "font-size": 10.5 }, back));
    } else {
      const y = TALL + 20 + 34 * level, begin = x(from) + BOX / 2 + 8 * level, end = x(to) + BOX / 2 - 8 * (level + 1);
      level += 1;
      svg.append(shape("path", { d: `M${begin} ${TALL + 2} V${y} H${end} V${TALL + 4}`, stroke: "currentColor", fill: "none" }), tip(end, TALL + 3, 0, -1));
      svg.append(shape("text", { x: (begin + end) / 2, y: y + 14, "text-anchor": "middle", fill: "currentColor", "font-size": 10.5 },
        `${there}${back ? `, ${back}` : ""}`));
    }
  }
  names.forEach((name, at) => {
    const stage = page.stages[at - 1];
    svg.append(shape("rect", { x: x(at), y: 2, width: BOX, height: TALL, rx: 6, fill: "var(--soft)", stroke: "var(--line)" }));
    const lines = stage ? [name, shortened(stage.modules || stage.name, 25), `${plural(stage.replicas, "replica")}, ${plural(stage.ops, "operator")}`]
      : [name, at ? "get the outputs" : "have the inputs"];
    lines.forEach((line, row) => svg.append(shape("text", { x: x(at) + 10, y: 22 + 18 * row, fill: "currentColor",
      "font-weight": row ? 400 : 600, "font-size": row ? 11 : 13 }, line)));
  });
  const node = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Diagram of the stages" }, svg);
  // A little smaller if it fits then; what would be too small to read is scrolled.
  new ResizeObserver(() => {
    const part = node.clientWidth >= 0.7 * wide ? Math.min(node.clientWidth / wide, 1) : 1;
    svg.setAttribute("width", part * wide);
    svg.setAttribute("height", part * tall);
  }).observe(node);
  return node;
}

const ops = page.ops;
const textOf = (column, place) => (column.length ? ops.texts[column[place]] : "");
const HEADS = ["#", "operator", "of torch", "module", "source", "stage", "block", "type", "work", "parameters", "output"];
const NUMBERS = [0, 5, 6, 8, 9, 10];
const value = (column, place) => (column.length ? column[place] : 0);
const sizeOr = (count) => (count ? bytes(count) : "");
function cells(place) {
  return [String(place), ops.names[place], textOf(ops.target, place), textOf(ops.module, place), textOf(ops.source, place),
    String(ops.stage[place]), ops.block.length ? String(ops.block[place]) : "", textOf(ops.dtype, place),
    flops(value(ops.flops, place)), sizeOr(value(ops.param_bytes, place)), sizeOr(value(ops.output_bytes, place))];
}

function drawGraph() {
  const section = find("graph");
  if (page.stages.length <= 24) section.append(diagram());
  page.stages.forEach((stage, place) => {
    const body = make("div", {});
    body.append(make("p", { class: "small faint" }, `${stage.replicas > 1 ? "devices" : "device"} ${stage.devices}; ${plural(stage.pieces, "microbatch").replace("hs", "hes")} of a replica; `
      + `forward ${time(stage.forward_us)}, backward ${time(stage.backward_us)}, reduction ${time(stage.reduce_us)}; recomputes ${stage.recomputes}`));
    for (const layer of stage.layers) {
      const name = `${layer.name}${layer.count > 1 ? ` × ${layer.count}` : ""}`;
      const sums = [flops(layer.flops), layer.param_bytes ? `${bytes(layer.param_bytes)} of parameters` : ""].filter(Boolean).join(", ");
      const summary = make("summary", {}, name, make("span", { class: "small faint" },
        ` ${plural(layer.ops, "operator")}${layer.count > 1 ? " each" : ""}`
        + `${sums ? `${layer.count > 1 ? "; together" : ","} ${sums}` : ""}`
        + `${layer.source ? `, ${layer.source}` : ""}`));
      const inner = make("details", { on: { toggle: () => {
        if (inner.open && inner.children.length === 1) {
          const end = Math.min(layer.first + layer.ops, ops.names.length), rows = [];
          for (let op = layer.first; op < end; op += 1) rows.push(cells(op));
          inner.append(table(layer.count > 1 ? "Operators of the first of these layers" : "Operators", HEADS, rows, NUMBERS));
        }
      } } }, summary);
      body.append(inner);
    }
    if (stage.left_out) body.append(make("p", { class: "faint small" }, `${plural(stage.left_out, "layer")} more are left out of this page.`));
    else if (!stage.layers.length) body.append(make("p", { class: "faint small" }, "Its operators are listed below by name; more is not known of them."));
    section.append(make("details", { class: "stage", open: place === 0 }, make("summary", {}, `Stage ${place}: ${stage.modules || stage.name}`,
      make("span", { class: "small faint" }, ` ${plural(stage.ops, "operator")} on ${plural(stage.replicas, "replica")}`)), body));
  });
  if (!page.edges.length) return;
  const far = page.edges.some((each) => each.far_us);
  section.append(make("h3", {}, "Edges"), table("What a microbatch sends, values there and gradients back",
    ["from", "to", "values", "time", "gradients", "time", ...(far ? ["values between nodes"] : [])],
    page.edges.map((each) => [each.src, each.dst, bytes(each.values_bytes), time(each.values_us), sizeOr(each.grads_bytes),
      each.grads_us ? time(each.grads_us) : "", ...(far ? [time(each.far_us)] : [])]), [2, 3, 4, 5, 6]));
}

function drawDifference() {
  if (!page.against) return;
  const section = find("difference"), { rows, title, key, note } = page.against;
  section.hidden = false;
  section.append(make("p", {}, `Against ${title}, ${key}. ${note}`));
  const differ = rows.filter((row) => row.this !== row.other);
  const head = ["what", "this plan", "the other", "this relative to it"];
  const row = (each) => [each.what, each.this, each.other, each.change];
  section.append(differ.length ? table("What differs", head, differ.map(row), [3]) : make("p", {}, "Nothing of what is compared differs."));
  section.append(make("details", {}, make("summary", {}, "All that is compared"), table("All that is compared", head, rows.map(row), [3])));
}

function drawOperators() {
  const section = find("operators"), STEP = 100;
  const order = ops.names.map((_, place) => place);
  const raw = [(p) => p, (p) => ops.names[p], ...["target", "module", "source"].map((name) => (p) => textOf(ops[name], p)),
    (p) => ops.stage[p], (p) => value(ops.block, p), (p) => textOf(ops.dtype, p),
    ...["flops", "param_bytes", "output_bytes"].map((name) => (p) => value(ops[name], p))];
  const state = { words: [], column: 0, down: false, shown: STEP };
  const searched = [];
  const text = (place) => (searched[place] ??= cells(place).slice(1, 8).join(" ").toLowerCase());
  const count = make("p", { class: "small faint", role: "status" });
  const body = make("tbody", {});
  const more = make("button", { type: "button", on: { click: () => { state.shown += 5 * STEP; show(); } } }, "Show more");
  const heads = HEADS.map((name, column) => make("th", { scope: "col", class: NUMBERS.includes(column) ? "n" : "t" },
    make("button", { type: "button", on: { click: () => {
      state.down = state.column === column ? !state.down : NUMBERS.includes(column) && column > 7;
      state.column = column;
      show();
    } } }, name)));
  const box = make("input", { type: "search", id: "search", placeholder: "name, operator, module, file", autocomplete: "off",
    on: { input: () => { state.words = box.value.toLowerCase().split(/\s+/).filter(Boolean); state.shown = STEP; show(); } } });
  function show() {
    const key = raw[state.column], sign = state.down ? -1 : 1;
    const found = order.filter((place) => state.words.every((word) => text(place).includes(word)));
    found.sort((a, b) => { const x = key(a), y = key(b); return x < y ? -sign : x > y ? sign : a - b; });
    body.replaceChildren(...found.slice(0, state.shown).map((place) => make("tr", {},
      ...cells(place).map((each, column) => make("td", { class: NUMBERS.includes(column) ? "n" : "t" }, each)))));
    heads.forEach((head, column) => head.setAttribute("aria-sort",
      column !== state.column ? "none" : state.down ? "descending" : "ascending"));
    more.hidden = found.length <= state.shown;
    count.textContent = `${number(found.length)} of ${plural(order.length, "operator")}`
      + `${found.length > state.shown ? `, ${number(state.shown)} shown` : ""}`
      + `${ops.left_out ? `; ${number(ops.left_out)} more are left out of this page` : ""}`;
  }
  section.append(make("div", { class: "tools" }, make("label", { for: "search" }, "Search"), box), count,
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Operators" },
      make("table", {}, make("caption", {}, "Work and outputs are those of one microbatch"), make("thead", {}, make("tr", {}, ...heads)), body)),
    make("div", { class: "tools" }, more));
  show();
}

find("written").textContent = `${page.key} · ${page.written}`;
if (page.shortened) find("written").after(make("p", { class: "bad" }, page.shortened));
for (const draw of [drawVerdict, drawCosts, drawMemory, drawTimeline, drawGraph, drawDifference, drawOperators]) draw();
for (const section of document.querySelectorAll("main > section:not([hidden])"))
  find("contents").append(make("a", { href: `#${section.id}` }, section.querySelector("h2").textContent));
document.documentElement.dataset.drawn = "yes";
})();
