"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

// ---------------------------------------------------------------- elements: text goes in as text, never as markup
function html(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  return furnished(node, attributes, children);
}
function svg(tag, attributes = {}, ...children) {
  return furnished(document.createElementNS(SVG, tag), attributes, children);
}
function furnished(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) {
    if (name === "style") Object.assign(node.style, value); else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// Shapes, by where they are, how large, and in which colour.
const line = (x1, x2, y1, y2, stroke) => svg("line", {x1, x2, y1, y2, stroke});
const words = (x, y, anchor, text) => svg("text", {x, y, "text-anchor": anchor}, text);
const dot = (cx, cy, r, fill, more = {}) => svg("circle", {cx, cy, r, fill, ...more});
const stroke = (d, colour, width, more = {}) =>
  svg("path", {d, fill: "none", stroke: colour, "stroke-width": width, "stroke-linejoin": "round", ...more});
const diamond = (x, y, r, more = {}, ...children) => svg(
  "path", {d: `M${x} ${y - r}l${r} ${r}l${-r} ${r}l${-r} ${-r}z`, fill: "var(--seen)", stroke: "var(--halo)", ...more}, ...children);
const box = (x, y, width, height, fill, more = {}) =>
  svg("rect", {x, y, width: Math.max(width, 1), height: Math.max(height, 1), fill, ...more});
const route = (points) => points.map(([x, y], k) => `${k ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

// ---------------------------------------------------------------- numbers
function say(x, digits = 3) {
  if (x === null || x === undefined) return "–";
  if (typeof x !== "number") return String(x);
  if (Number.isInteger(x) && Math.abs(x) < 1e7) return x.toLocaleString("en").replace("-", "−");
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return x.toExponential(2).replace("-", "−");
  return String(Number(x.toPrecision(Math.max(digits, Math.ceil(Math.log10(size + 1)))))).replace("-", "−");
}
const fixed = (x, places) => x === null || x === undefined ? "–"
  : Number(x).toFixed(places).replace(/^-(0(?:\.0*)?)$/, "$1").replace("-", "−");
const percent = (p) => p === null ? "–" : p > 0 && p < .005 ? "<\u00a01\u00a0%"
  : p < 1 && p > .995 ? ">\u00a099\u00a0%" : `${Math.round(100 * p)}\u00a0%`;
function ticks(low, high, about) {
  const raw = (high - low) / Math.max(about, 1) || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= raw * .999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) found.push(Number((k * step).toPrecision(12)));
  return found;
}
function extent(values, margin = .06) {
  let low = Infinity, high = -Infinity;
  for (const v of values) if (v !== null && Number.isFinite(v)) { if (v < low) low = v; if (v > high) high = v; }
  if (low > high) return [0, 1];
  const room = (high - low) * margin || Math.abs(high) * margin || 1;
  return [low - room, high + room];
}
const linear = (low, high, from, to) => (v) => from + (v - low) / (high - low || 1) * (to - from);
// Text of pictures is measured before it is drawn: letters differ too much in width to be counted.
const ruler = document.createElement("canvas").getContext("2d");
function widthOf(text) {
  ruler.font = `600 12px ${getComputedStyle(document.body).fontFamily}`;
  return ruler.measureText(text).width;
}
const fits = new Map();
function fitted(text, room) {
  const key = `${Math.floor(room)} ${text}`;
  if (!fits.has(key)) {
    let letters = [...text], shown = text;
    while (letters.length && widthOf(shown) > room) { letters.pop(); shown = letters.join("").trimEnd() + "…"; }
    fits.set(key, shown);
  }
  return fits.get(key);
}

const colour = (k) => data.colours[k % data.colours.length];
const dash = (k) => [null, "6 3", "2 3", "6 3 2 3"][Math.floor(k / data.colours.length) % 4];

// ---------------------------------------------------------------- tables
function table(columns, rows, label, decimals = []) {
  const numeric = columns.map((_, k) => rows.length > 0 && rows.every((row) => row[k] === null || typeof row[k] === "number"));
  // One number of decimals for a column, so that its points lie below each other.
  const places = columns.map((_, k) => {
    if (typeof decimals[k] === "number") return decimals[k];
    const sizes = numeric[k] ? rows.map((row) => Math.abs(row[k] ?? 0)) : [];
    if (!sizes.length || sizes.every(Number.isInteger)) return null;
    const most = Math.max(...sizes);
    return most < 1e-4 || most >= 1e7 ? null : Math.max(2, Math.min(4, 2 - Math.floor(Math.log10(most))));
  });
  const shown = (value, k) => places[k] === null || value === null ? say(value, 4)
    : value > 0 && value < .5 * 10 ** -places[k] ? `<\u00a0${10 ** -places[k]}` : fixed(value, places[k]);
  const cell = (tag, text, k, more = {}) => html(tag, {class: numeric[k] ? "number" : null, ...more}, text);
  const scroll = html("div", {class: "scroll", role: "group", "aria-label": label}, html("table", {"aria-label": label},
    html("thead", {}, html("tr", {}, ...columns.map((name, k) => cell("th", name, k, {scope: "col"})))),
    html("tbody", {}, ...rows.map((row) => html("tr", {}, ...row.map((value, k) => cell("td", shown(value, k), k)))))));
  // A table that is cut says so, fades out where it goes on, and can be scrolled by keys.
  const hint = html("p", {class: "scroll-hint", hidden: ""}, "The table goes on: scroll it sideways.");
  const look = () => {
    const over = scroll.scrollWidth - scroll.clientWidth;
    hint.hidden = over <= 1;
    scroll.classList.toggle("more", over > 1 && scroll.scrollLeft < over - 1);
    if (over > 1) scroll.tabIndex = 0; else scroll.removeAttribute("tabindex");
  };
  scroll.onscroll = look;
  onResize(scroll, look);
  return html("div", {}, scroll, hint);
}

function section(id, title, ...children) {
  return html("section", {id, "aria-labelledby": `${id}-heading`}, html("h2", {id: `${id}-heading`}, title), ...children);
}

// ---------------------------------------------------------------- header
function header() {
  byId("title").textContent = data.title;
  byId("lead").textContent = data.lead;
  for (const [name, value] of data.facts) byId("facts").append(html("li", {}, `${name} `, html("b", {}, value)));
  if (data.solved?.likelihood) byId("facts").append(html("li", {}, "learned by ", html("b", {}, data.solved.likelihood)));
  if (data.solved?.sentence) byId("facts").after(html(
    "p", {id: "verdict", class: `verdict${data.solved.solved ? "" : " warning"}`}, data.solved.sentence));
  if (data.unfinished) byId("facts").append(html("li", {class: "warning"}, data.unfinished));
  byId("foot").textContent = data.foot;
}

// ---------------------------------------------------------------- headline
function headline(part, found) {
  if (found.numbers) part.append(html("dl", {class: "numbers"}, ...found.numbers.map(({name, value, more}) =>
    html("div", {}, html("dt", {}, name), html("dd", {}, value.replace(/^-/, "−"), more ? html("small", {}, more) : null)))));
  for (const {columns, rows, label} of found.tables)
    part.append(html("div", {class: `headline-table${columns.length > 6 ? "" : " few"}`}, table(columns, rows, label)));
}

// ---------------------------------------------------------------- Algorithm 1
function algorithm1(part, {sentence, columns, rows, label, decimals}) {
  part.append(html("p", {}, sentence), table(columns, rows, label, decimals));
}

// ---------------------------------------------------------------- convergence
function convergence(part, found) {
  const charts = html("div", {class: "charts"});
  for (const series of found.series) {
    const reading = html("span", {}), picture = svg("svg", {role: "img", "aria-label": `${series.label} against iteration`});
    charts.append(html("figure", {}, html("figcaption", {}, series.label, reading), picture));
    const draw = () => curve(picture, found.iteration, series, reading);
    onResize(picture, draw);
  }
  const size = found.batches_per_point, around = size * (2 * reach(found.iteration.length) + 1);
  const note = `Thin: ${size === 1 ? "each batch" : `means of ${size} batches`}. Thick, and the number above: `
    + `the mean over the ${around} iterations around, or as many of them as there are.`;
  part.append(charts);
  if (found.series.some((series) => series.noisy)) part.append(html("p", {class: "note"}, note));
}
const reach = (points) => Math.max(1, Math.round(points / 24));
function curve(picture, xs, series, reading) {
  const ys = series.values;
  const [lowest, high] = extent(series.reference === null ? ys : [...ys, series.reference]);
  const low = series.name === "entropy" ? 0 : lowest, marks = ticks(low, high, 4);
  const W = picture.clientWidth || 320, H = 206, bottom = 42, top = 8, right = 8;
  const left = 10 + Math.max(...marks.map((v) => widthOf(say(v))));
  const x = linear(xs[0], xs[xs.length - 1], left, W - right), y = linear(low, high, H - bottom, top);
  picture.setAttribute("viewBox", `0 0 ${W} ${H}`);
  picture.replaceChildren();
  for (const v of marks) picture.append(
    line(left, W - right, y(v), y(v), "var(--grid)"),
    words(left - 7, y(v) + 4, "end", say(v)));
  for (const v of ticks(xs[0], xs[xs.length - 1], W / 60)) picture.append(
    words(x(v), H - bottom + 18, "middle", say(v)));
  picture.append(words((left + W - right) / 2, H - 5, "middle", "iteration"));
  const path = (values) => {
    const pieces = [[]];  // without what was not measured
    values.forEach((v, k) => v === null ? pieces.push([]) : pieces.at(-1).push([x(xs[k]), y(v)]));
    return pieces.map(route).join("");
  };
  const window = reach(ys.length);
  const smooth = !series.noisy ? ys : ys.map((_, k) => {
    const near = ys.slice(Math.max(0, k - window), k + window + 1).filter((v) => v !== null);
    return near.length ? near.reduce((a, b) => a + b, 0) / near.length : null;
  });
  if (series.reference !== null) picture.append(
    stroke(`M${left} ${y(series.reference)}H${W - right}`, "var(--soft)", 1, {"stroke-dasharray": "4 4"}),
    words(W - right, y(series.reference) + 15, "end", series.reference_label));
  picture.append(stroke(path(ys), "var(--accent)", series.noisy ? 1 : 2, {opacity: series.noisy ? .35 : 1}));
  if (series.noisy) picture.append(stroke(path(smooth), "var(--accent)", 2.2));
  const mark = svg("circle", {r: 4, fill: "var(--accent)", stroke: "var(--halo)", visibility: "hidden"});
  picture.append(mark);
  const last = ys.length - 1;
  const read = (k, there) => {  // what the thick line says, and where it was pointed at also the thin one
    const batch = there && series.noisy ? `, thin ${say(ys[k])}` : "";
    reading.textContent = there ? `${say(smooth[k])}${batch} at iteration ${say(xs[k])}` : `${say(smooth[k])} at the end`;
    mark.setAttribute("visibility", there && smooth[k] !== null ? "visible" : "hidden");
    if (smooth[k] !== null) { mark.setAttribute("cx", x(xs[k])); mark.setAttribute("cy", y(smooth[k])); }
  };
  read(last, false);
  picture.onpointermove = (event) => {
    const at = (event.clientX - picture.getBoundingClientRect().left) / (picture.clientWidth || 1) * W;
    let best = 0;
    xs.forEach((v, k) => { if (Math.abs(x(v) - at) < Math.abs(x(xs[best]) - at)) best = k; });
    read(best, true);
  };
  picture.onpointerleave = () => read(last, false);
}

// ---------------------------------------------------------------- drawing again when there is another width
function onResize(node, draw) {
  let width = -1;
  const again = () => { const now = node.clientWidth; if (now && now !== width) { width = now; draw(); } };
  new ResizeObserver(again).observe(node);
  requestAnimationFrame(again);
}

// ---------------------------------------------------------------- the player
function unpacked(packed) {
  const bytes = Uint8Array.from(atob(packed.levels), (c) => c.charCodeAt(0));
  const view = new DataView(bytes.buffer), unit = (packed.high - packed.low) / 65535;
  const strides = packed.shape.map((_, k) => packed.shape.slice(k + 1).reduce((a, b) => a * b, 1));
  const place = (index) => 2 * index.reduce((sum, i, k) => sum + i * strides[k], 0);
  return {shape: packed.shape, at: (...index) => packed.low + unit * view.getUint16(place(index), true)};
}

function player(run) {
  const fragment = byId("player-template").content.cloneNode(true);
  const get = (id) => fragment.getElementById(id);
  const [picture, slider, clock, said, saw] = ["picture", "time", "clock", "said", "saw"].map(get);
  const [belief, why, episodes, parts] = ["belief", "why", "episode", "part"].map(get);
  const playShape = get("play-shape"), play = get("play"), entropyText = get("entropy"), decision = get("decision");
  const buttons = {first: get("first"), back: get("back"), forward: get("forward"), last: get("last")};
  const legend = get("legend"), root = get("player"), T = Math.max(...run.length), C = run.contexts.length;
  const A = run.actions.length, axes = run.axes, lanes = axes ? axes.map((axis) => axis.name) : run.actions;
  const end = () => run.length[b];  // of this episode, in steps
  for (const part of run.parts) if (part.cloud) part.cloud = unpacked(part.cloud);
  const returns = run.return, worth = (s) => run.discount ** s;
  run.true_context.forEach((c, b) => episodes.append(
    html("option", {value: b}, `${b + 1}: ${run.contexts[c]}, return ${say(returns[b])}`)));
  run.parts.forEach((part, k) => parts.append(html("option", {value: k}, part.name)));
  if (run.parts.length < 2) get("part-label").remove();
  if (data.played_by) get("played-by").textContent = `played by ${data.played_by}`; else get("played-by").remove();
  get("player-note").textContent = `Beliefs are those of the filter “${run.likelihood}”. Reward and information are `
    + "those of one step alone, which is not all that a policy that looks ahead goes by: the expected reward, and "
    + "what the step is expected to tell about the context, estimated from outcomes that the filter tried out."
    + (axes ? ` Besides what was chosen, they are told of a few actions that stand for all: the middle of what is possible, `
      + "and the ends of every axis." : "")
    + (run.can_end ? " That an episode goes on, or ends, is seen, too, and counts as evidence." : "");
  const hasProbabilities = run.action_probabilities.some((each) => each.some((row) => row[0] !== null));
  decision.querySelector("thead").append(html("tr", {}, html("th", {scope: "col"}, "Action"),
    hasProbabilities ? html("th", {scope: "col", class: "policy"}, "Policy") : null,
    html("th", {scope: "col", class: "number"}, "Reward, expected"), html("th", {scope: "col", class: "number"}, "Information, bits")));

  let b = 0, t = 0, k = 0, timer = null;

  // Extents are those of all episodes, so that a picture can be compared with the next.
  const bounds = run.parts.map((part) => {
    if (part.kind === "finite") return null;
    const D = part.true[0][0].length;
    return Array.from({length: D}, (_, d) => {
      const values = part.true.flat().map((point) => point[d]);
      part.mean.forEach((times, e) => times.forEach((row, s) => row.forEach((m, c) => {
        if (run.posterior[e][s][c] > .05) values.push(m[d] - 1.5 * part.deviation[e][s][c][d], m[d] + 1.5 * part.deviation[e][s][c][d]);
      })));
      return extent(values);
    });
  });

  const mark = () => html("span", {class: "true"}, "true");
  const bar = (tag, share, more = {}) => html(tag, {class: "track", "aria-hidden": "true"},
    html("div", {class: "fill", style: {width: `${100 * share}%`, ...more}}));

  function explain() {
    const names = run.contexts, p = run.posterior[b][t], best = p.indexOf(Math.max(...p));
    const words = [];
    if (t > 0) {
      words.push(`It chose ${named(t - 1)} and ${whatSeen(t) ? "saw " + whatSeen(t) : "saw nothing"}.`);
    } else words.push(whatSeen(0) ? `Before the first action it saw ${whatSeen(0)}.` : "Nothing has been seen yet.");
    const judged = best === run.true_context[b] ? "true" : "wrong";
    if (C > 1) words.push(Math.max(...p) - Math.min(...p) < .01 ? "Every context is as likely as the others."
      : `It takes the context to be “${names[best]}” (${percent(p[best])}), which is ${judged}.`);
    if (t < end()) {
      const q = axes ? null : run.action_probabilities[b][t][run.action[b][t]];
      words.push(`Now: ${named(t)}${q === null ? "" : ` (${percent(q)})`}, for a reward of ${say(run.reward[b][t])}.`);
    } else words.push(`${run.ended[b] ? "The episode has ended" : "The episode is over"}, with a return of ${say(returns[b])}.`);
    return words.join(" ");
  }
  const named = (time) => axes ? axes.map(({name}, d) => `${name} = ${say(run.action[b][time][d])}`).join(", ")
    : `“${run.actions[run.action[b][time]]}”`;
  function whatSeen(time) {
    return Object.entries(run.seen).filter(([, values]) => values[b][time] !== null)
      .map(([site, values]) => `${site} = ${vector(values[b][time])}`).join(", ");
  }
  const vector = (values) => values.length === 1 ? say(values[0]) : `(${values.map((v) => say(v)).join(", ")})`;

  function update() {
    slider.max = end();
    slider.value = t;
    slider.setAttribute("aria-valuetext", `step ${t} of ${end()}`);
    clock.textContent = `t = ${t} of ${end()}${run.ended[b] && t === end() ? ", ended" : ""}`;
    for (const [name, button] of Object.entries(buttons)) button.disabled = name === "first" || name === "back" ? t === 0 : t === end();
    said.textContent = explain();
    saw.replaceChildren();
    for (const [site, values] of Object.entries(run.seen)) if (values[b][t] !== null)
      saw.append(html("span", {}, `${site} = `, html("b", {}, vector(values[b][t]))));
    if (!saw.hasChildNodes()) saw.append("nothing");
    entropyText.textContent = `(${fixed(run.entropy[b][t], 2)} bits open)`;
    belief.replaceChildren(...run.contexts.map((name, c) => {
      const p = run.posterior[b][t][c];
      return html("li", {},
        html("div", {class: "top"}, html("span", {}, name, c === run.true_context[b] ? mark() : null),
          html("span", {}, percent(p))),
        bar("div", p, {background: colour(c)}));
    }));
    decision.hidden = t === end();
    if (t < end()) why.replaceChildren(...run.actions.map((name, a) => {
      const q = run.action_probabilities[b][t][a], chosen = axes ? a === 0 : a === run.action[b][t];
      return html("tr", {class: chosen ? "chosen" : null, "aria-current": chosen ? "true" : null},
        html("td", {title: name}, html("span", {class: "name"}, name)),
        hasProbabilities ? html("td", {}, bar("span", q ?? 0), percent(q)) : null,
        html("td", {class: "number"}, fixed(run.expected_reward[b][t][a], 2)),
        html("td", {class: "number"}, fixed(run.expected_information[b][t][a], 2)));
    }));
    draw();
  }

  function draw() {
    const W = picture.clientWidth || 700, part = run.parts[k], narrow = W < 520;
    const widest = Math.max(...lanes.map(widthOf), widthOf("reward"));
    const left = Math.min(12 + widest, narrow ? 92 : 150), sideways = Math.max(56, Math.min(130, W * .17)), gap = 14;
    const stop = W - sideways - gap, step = (stop - left) / (T + 1), x = linear(0, T, left + step / 2, stop - step / 2);
    picture.replaceChildren();
    const put = (...nodes) => picture.append(...nodes);
    const label = (text, y, strong = false) => put(
      svg("text", {x: left - 8, y: y + 4, "text-anchor": "end", class: strong ? "strong" : null},
        fitted(text, left - 10), svg("title", {}, text)));
    let y0 = part.kind === "plane" ? plane(part, W, put) : inTime(part, {W, left, stop, step, sideways, gap, x}, put, label, narrow);

    // What the policy held likely (shading) and did (dots).
    const before = y0, cell = Math.min(24, step);
    y0 = axes ? controls({left, stop, x, cell}, y0 + 22, put, label, narrow) : choices({W, left, stop, x, cell}, y0 + 22, put, label, narrow);
    const tallActions = y0 - before;
    y0 += 26;

    // What it earned.
    const rewards = run.reward[b], size = Math.max(...run.reward.flat().map(Math.abs), 1e-9), half = 20;
    const sum = rewards.slice(0, t).reduce((total, r, s) => total + worth(s) * r, 0);
    const discounted = run.discount === 1 ? "" : `, discounted by ${run.discount} a step`;
    put(words(left, y0 - 4, "start", fitted(`rewards, ${say(Number(sum.toPrecision(6)))} in total so far${narrow ? "" : discounted}`, W - left)));
    label("reward", y0 + half);
    put(line(left, stop, y0 + half, y0 + half, "var(--line)"));
    for (let s = 0; s < t; s++) {
      const h = half * Math.abs(rewards[s]) / size;
      const wide = Math.min(cell, 14), good = rewards[s] > 0;
      if (h > 0) put(box(x(s) - wide / 2 + .5, y0 + half - (good ? h : 0), wide - 1, h, good ? "var(--good)" : "var(--bad)", {rx: 1}));
    }
    y0 += 2 * half + 30;

    // What it believed.
    const tall = narrow ? 80 : 96, y = linear(0, 1, y0 + tall, y0);
    put(words(left, y0 - 10, "start", "probability of each context"));
    for (const v of [0, .5, 1]) {
      put(line(left, stop, y(v), y(v), "var(--grid)"));
      label(String(v), y(v));
    }
    const heights = [];
    for (let c = 0; c < C; c++) {
      const p = run.posterior[b].slice(0, t + 1).map((row) => row[c]), mine = c === run.true_context[b];
      put(stroke(route(p.map((v, s) => [x(s), y(v)])), colour(c), mine ? 3 : 1.6,
        {"stroke-dasharray": dash(c), "stroke-linecap": "round"}));
      put(dot(x(t), y(p[t]), mine ? 4.5 : 3.2, colour(c), {stroke: "var(--halo)"}));
      heights.push([p[t], c]);
    }
    for (const v of ticks(0, T, narrow ? 5 : 10)) if (Number.isInteger(v)) put(words(x(v), y0 + tall + 20, "middle", v));
    put(words(stop + 8, y0 + tall + 20, "start", "time"));
    const late = x(t) > stop - 50;
    if (run.ended[b] && t === end()) put(words(x(t) + (late ? -7 : 7), y0 + 12, late ? "end" : "start", "ended"));
    const height = y0 + tall + 28;
    const topOfTime = part.kind === "plane" ? height - 28 - (tall + 30 + 2 * half + 26 + tallActions - 22) : 8;
    picture.prepend(stroke(`M${x(t)} ${topOfTime}V${y0 + tall}`, "var(--line)", 1.5, {id: "cursor"}));
    picture.setAttribute("viewBox", `0 0 ${W} ${height}`);
    picture.style.height = `${height}px`;
    picture.setAttribute("aria-label", `Episode ${b + 1}, ${part.name} up to time ${t}: ${said.textContent}`);
  }

  // Which of finitely many actions: a lane for each.
  function choices({W, left, stop, x, cell}, y0, put, label, narrow) {
    const lane = A > 8 ? 13 : 20;
    const shading = narrow ? "; shading: policy" : ": dots were chosen, shading is the policy’s probability";
    put(words(left, y0 - 6, "start", fitted(`actions${hasProbabilities ? shading : ""}`, W - left)));
    for (let a = 0; a < A; a++) {
      const y = y0 + lane * (a + .5);
      label(run.actions[a], y, t < end() && run.action[b][t] === a);
      put(line(left, stop, y, y, "var(--grid)"));
      for (let s = 0; s <= Math.min(t, end() - 1); s++) {
        const q = run.action_probabilities[b][s][a];
        if (q !== null && q > .01) put(
          box(x(s) - cell / 2 + .5, y - lane / 2 + 1, cell - 1, lane - 2, "var(--accent)", {rx: 2, opacity: (.5 * q).toFixed(3)}));
        if (run.action[b][s] === a) put(
          dot(x(s), y, s === t ? 5 : 3.2, s === t ? "var(--accent)" : "var(--ink)", {stroke: "var(--halo)"}));
      }
    }
    return y0 + lane * A;
  }

  // Continuous actions: a lane for each axis, from its lowest value to its highest.
  function controls({left, stop, x, cell}, y0, put, label, narrow) {
    const tall = axes.length > 3 ? 30 : 46, gap = 16, spread = run.action_spread[b];
    const known = run.action_spread.some((each) => each.some((ends) => ends[0][0] !== null));
    const shading = narrow ? "; bars: policy" : ": dots were chosen, bars are where the policy chooses 9 out of 10";
    put(words(left, y0 - 6, "start", fitted(`actions${known ? shading : ""}`, stop - left)));
    axes.forEach(({name, low, high}, d) => {
      const top = y0 + d * (tall + gap), y = linear(low, high, top + tall, top);
      label(name, y((low + high) / 2), t < end());
      for (const v of [low, high]) put(line(left, stop, y(v), y(v), "var(--grid)"), words(stop + 6, y(v) + 4, "start", say(v)));
      if (low < 0 && high > 0) put(line(left, stop, y(0), y(0), "var(--line)"));
      const last = Math.min(t, end() - 1);
      for (let s = 0; s <= last; s++) if (spread[s][0][d] !== null) {
        const [from, to] = [y(spread[s][0][d]), y(spread[s][1][d])];
        put(box(x(s) - cell / 2 + .5, to, cell - 1, from - to, "var(--accent)", {rx: 2, opacity: .25}));
      }
      for (let s = 0; s <= last; s++) put(
        dot(x(s), y(run.action[b][s][d]), s === t ? 5 : 3.2, s === t ? "var(--accent)" : "var(--ink)", {stroke: "var(--halo)"}));
    });
    return y0 + axes.length * (tall + gap) - gap;
  }

  // A number, or one of finitely many states, against time; beside it, what is believed of it now.
  function inTime(part, {W, left, stop, step, sideways, gap, x}, put, label, narrow) {
    const top = 22, finite = part.kind === "finite", N = finite ? part.probabilities[0][0][0].length : 0;
    const tall = finite ? Math.max(150, Math.min(320, N * 30)) : narrow ? 220 : 270;
    const p = run.posterior[b], at = stop + gap, row = tall / Math.max(N, 1);
    const [low, high] = finite ? [-.5, N - .5] : bounds[k][0], y = linear(low, high, top + tall, top);
    const title = `${part.name}: the truth (line) and what is believed (${finite ? "shading" : "bands"})`;
    put(words(left, 10, "start", fitted(narrow ? part.name : title, stop - left)));
    put(words(at, 10, "start", narrow ? "now" : "believed now"));
    const every = finite ? Math.ceil(N / (tall / 14)) : 0;
    for (const v of finite ? Array.from({length: N}, (_, s) => s).filter((s) => s % every === 0) : ticks(low, high, 5)) {
      put(line(left, W, y(v), y(v), "var(--grid)"));
      label(say(v), y(v));
    }
    const stacks = [];
    if (finite) {
      for (let s = 0; s <= t; s++) for (let i = 0; i < N; i++) {
        const mass = p[s].reduce((sum, q, c) => sum + q * part.probabilities[b][s][c][i], 0);
        if (mass > .003) put(box(x(s) - step / 2 + .5, y(i) - row / 2 + 1, step - 1, row - 2, "var(--heat)",
          {rx: 3, opacity: (.06 + .44 * mass).toFixed(3)}));
      }
      for (let i = 0; i < N; i++) stacks.push([y(i), Math.max(row - 4, 1), p[t].map((q, c) => q * part.probabilities[b][t][c][i])]);
    } else {
      const within = (v) => Math.max(top, Math.min(top + tall, y(v)));
      const edge = (s, c, side) => within(part.mean[b][s][c][0] + side * 2 * part.deviation[b][s][c][0]);
      for (let c = 0; c < C; c++) for (let s = 1; s <= t; s++) {
        const weight = (p[s - 1][c] + p[s][c]) / 2;
        if (weight < .01) continue;
        const corners = [[s - 1, 1], [s, 1], [s, -1], [s - 1, -1]].map(([u, side]) => [x(u), edge(u, c, side)]);
        put(svg("path", {d: `${route(corners)}z`, fill: colour(c), opacity: (.32 * weight).toFixed(3)}));
      }
      const M = part.cloud.shape[3], bins = 64, counts = Array.from({length: bins}, () => new Array(C).fill(0));
      const inside = (v) => v >= low && v <= high;
      for (let c = 0; c < C; c++) for (let m = 0; m < M; m++) {
        const v = part.cloud.at(b, t, c, m, 0);
        if (!inside(v)) continue;
        counts[Math.min(bins - 1, Math.floor((v - low) / (high - low) * bins))][c] += p[t][c] / M;
        // Golden-ratio steps fill the column evenly, and the same each time.
        const aside = ((m * .618034) % 1 - .5) * 14;
        if (p[t][c] > .01) put(dot((x(t) + aside).toFixed(1), y(v).toFixed(1), 1.5, colour(c), {opacity: (.1 + .6 * p[t][c]).toFixed(2)}));
      }
      counts.forEach((masses, i) => stacks.push([y(low + (i + .5) / bins * (high - low)), Math.max(tall / bins - 1, 1), masses]));
    }
    // Contexts lie beside one another, in proportion to their probability.
    const most = finite ? 1 : Math.max(...stacks.map(([, , masses]) => masses.reduce((a, c) => a + c, 0)), 1e-9);
    put(line(at, at, top, top + tall, "var(--line)"));
    for (const [middle, thick, masses] of stacks) {
      let from = at;
      masses.forEach((mass, c) => {
        const long = mass / most * (sideways - 4);
        if (long > .2) put(svg("rect", {x: from, y: middle - thick / 2, width: long, height: thick, fill: colour(c)}));
        from += long;
      });
    }
    const path = part.true[b].slice(0, t + 1).map((point) => point[0]);
    put(stroke(route(path.map((v, s) => [x(s), y(v)])), "var(--truth)", 2));
    if (finite) path.forEach((v, s) => put(dot(x(s), y(v), 2.6, "var(--truth)")));
    if (part.site) for (let s = 0; s <= t; s++) {
      const seen = run.seen[part.site][b][s];
      if (seen === null) continue;
      const v = Math.max(low, Math.min(high, seen[0])), r = s === t ? 6 : 4.2;
      put(diamond(x(s), y(v), r, {}, svg("title", {}, `${part.site} = ${say(seen[0])}`)));
    }
    put(dot(x(t), y(path[t]), 6, "var(--truth)", {id: "here", stroke: "var(--halo)", "stroke-width": 2}));
    put(svg("path", {d: `M${at - 2} ${y(path[t])}l-8 -5v10z`, fill: "var(--truth)"}));
    return top + tall;
  }

  // A point on a plane, with equal units both ways.
  function plane(part, W, put) {
    const top = 20, left = 44, tall = Math.min(420, Math.max(260, W * .62)), p = run.posterior[b];
    const [[xl, xh], [yl, yh]] = bounds[k];
    const unit = Math.min((W - left - 10) / (xh - xl), tall / (yh - yl));
    const middleX = (xl + xh) / 2, middleY = (yl + yh) / 2, cx = left + (W - left - 10) / 2, cy = top + tall / 2;
    const x = (v) => cx + (v - middleX) * unit, y = (v) => cy - (v - middleY) * unit;
    const reachX = (W - left - 10) / 2 / unit, reachY = tall / 2 / unit;
    const title = `${part.name}: the truth (line) and what is believed (points)`;
    put(words(left, 10, "start", fitted(W < 520 ? part.name : title, W - left)));
    const gridX = ticks(middleX - reachX, middleX + reachX, W / 75), step = gridX.length > 1 ? gridX[1] - gridX[0] : 1;
    for (const v of gridX) put(line(x(v), x(v), top, top + tall, "var(--grid)"), words(x(v), top + tall + 16, "middle", say(v)));
    for (let v = Math.ceil((middleY - reachY) / step) * step; v <= middleY + reachY; v += step) {
      const shown = Number(v.toPrecision(6));
      put(line(left, W - 10, y(v), y(v), "var(--grid)"), words(left - 7, y(v) + 4, "end", say(Math.abs(shown) < 1e-9 ? 0 : shown)));
    }
    const M = part.cloud.shape[3], inside = (px, py) => px > left && px < W - 10 && py > top && py < top + tall;
    for (let c = 0; c < C; c++) if (p[t][c] > .005) for (let m = 0; m < M; m++) {
      const px = x(part.cloud.at(b, t, c, m, 0)), py = y(part.cloud.at(b, t, c, m, 1));
      if (inside(px, py)) put(dot(px.toFixed(1), py.toFixed(1), 2.2, colour(c), {opacity: (.08 + .55 * p[t][c]).toFixed(2)}));
    }
    const path = part.true[b].slice(0, t + 1);
    put(stroke(route(path.map((v) => [x(v[0]), y(v[1])])), "var(--truth)", 2, {opacity: .75}));
    path.forEach((v, s) => put(dot(x(v[0]), y(v[1]), 2.6, "var(--truth)", {opacity: (.25 + .6 * s / Math.max(t, 1)).toFixed(2)})));
    if (part.site) path.forEach((_, s) => {
      const seen = run.seen[part.site][b][s];
      if (seen !== null && seen[0] !== null && seen[1] !== null && inside(x(seen[0]), y(seen[1])))
        put(diamond(x(seen[0]), y(seen[1]), 5, {opacity: s === t ? 1 : .5}));
    });
    for (let c = 0; c < C; c++) if (p[t][c] > .005) {
      const [mx, my] = part.mean[b][t][c];
      const cross = `M${x(mx) - 7} ${y(my)}h14M${x(mx)} ${y(my) - 7}v14`;
      if (inside(x(mx), y(my))) put(stroke(cross, colour(c), 2.5, {opacity: (.3 + .7 * p[t][c]).toFixed(2)}));
    }
    const [hereX, hereY] = path[t];
    put(dot(x(hereX), y(hereY), 7, "var(--truth)", {id: "here", stroke: "var(--halo)", "stroke-width": 2}));
    return top + tall + 24;
  }

  function legends() {
    const part = run.parts[k], icon = {viewBox: "0 0 18 12", "aria-hidden": "true"};
    const item = (shape, text) => html("li", {}, svg("svg", icon, shape), text);
    legend.replaceChildren(
      item(dot(9, 6, 5, "var(--truth)"), "the truth"),
      ...run.contexts.map((name, c) => item(box(1, 2, 16, 8, colour(c), {rx: 2}), `if “${name}”`)),
      ...(part.site ? [item(diamond(9, 6, 5), `${part.site}, seen`)] : []));
  }

  // ---- moving
  function go(time) { t = Math.max(0, Math.min(end(), time)); update(); }
  function pause() {
    clearInterval(timer); timer = null;
    play.setAttribute("aria-label", "Play"); playShape.setAttribute("d", "M3 1.5v13L14 8z");
    said.setAttribute("aria-live", "polite");
  }
  function toggle() {
    if (timer) { pause(); return; }
    if (t === end()) go(0);
    said.setAttribute("aria-live", "off");  // or a screen reader would talk without end
    play.setAttribute("aria-label", "Pause"); playShape.setAttribute("d", "M3 2h4v12H3zM9 2h4v12H9z");
    timer = setInterval(() => { go(t + 1); if (t === end()) pause(); }, 700);
  }
  function toEpisode(number) { b = Math.max(0, Math.min(run.true_context.length - 1, number)); episodes.value = b; pause(); go(0); }

  buttons.first.onclick = () => { pause(); go(0); };
  buttons.back.onclick = () => { pause(); go(t - 1); };
  buttons.forward.onclick = () => { pause(); go(t + 1); };
  buttons.last.onclick = () => { pause(); go(end()); };
  play.onclick = toggle;
  slider.oninput = () => { pause(); go(Number(slider.value)); };
  episodes.onchange = () => toEpisode(Number(episodes.value));
  parts.onchange = () => { k = Number(parts.value); legends(); update(); };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    const on = event.target instanceof Element ? event.target.tagName : "";
    if (on === "SELECT" || on === "TEXTAREA" || (on === "INPUT" && event.key !== " ")) return;
    const keys = {
      ArrowLeft: () => { pause(); go(t - 1); }, ArrowRight: () => { pause(); go(t + 1); },
      Home: () => { pause(); go(0); }, End: () => { pause(); go(end()); },
      PageUp: () => toEpisode(b - 1), PageDown: () => toEpisode(b + 1),
    };
    if (on !== "BUTTON") keys[" "] = toggle;  // a button that has the focus is what Space presses
    if (Object.hasOwn(keys, event.key)) { event.preventDefault(); keys[event.key](); }
  });
  legends();
  update();
  onResize(picture, draw);
  return root;
}

// ---------------------------------------------------------------- diagnostics and configuration
function diagnostics(part, {rhat, calibration}) {
  if (calibration) part.append(html("p", {class: calibration.calibrated ? null : "warning"}, calibration.sentence),
    table(calibration.columns, calibration.rows, "Calibration", calibration.decimals));
  if (rhat) part.append(html("p", {}, rhat.sentence), table(rhat.columns, rhat.rows, "R-hat", rhat.decimals));
}
function configuration(part, found) {
  part.append(html("div", {class: "settings"}, ...found.map(({title, rows}) =>
    html("div", {}, html("h3", {}, title), html("table", {"aria-label": title}, html("tbody", {}, ...rows.map(([name, value]) =>
      html("tr", {}, html("th", {scope: "row"}, name), html("td", {}, value)))))))));
}
function pictures(part, {shown, left_out}) {
  if (shown.length) part.append(html("div", {class: "pictures"}, ...shown.map(({name, note, source}) =>
    html("figure", {}, html("figcaption", {}, html("b", {}, name), note ? `: ${note}` : null),
      html("img", {src: source, alt: `Figure: ${name}`, loading: "lazy"})))));
  if (left_out.length) part.append(html("p", {class: "note"}, `Left out, for the size of this page: ${left_out.join(", ")}.`));
}

header();
const sections = [
  ["headline", "Results", headline], ["player", null, null], ["algorithm1", "Episode after episode in one context", algorithm1],
  ["convergence", "Convergence", convergence], ["diagnostics", "Diagnostics", diagnostics], ["others", "Figures", null],
  ["configuration", "Configuration", configuration],
];
for (const [id, title, fill] of sections) {
  const found = data[id], drawn = data.pictures?.[id];
  if (!found && !drawn) continue;
  const part = id === "player" ? player(found) : section(id, title);
  if (found && fill) fill(part, found);
  if (drawn) pictures(part, drawn);
  byId("main").append(part);
}
