"use strict";
// The viewer of timelines: rows of spans and of amounts over time on one canvas, with one window of time for all of them.
(() => {
  const element = (id) => document.getElementById(id);
  const canvas = element("canvas");
  if (!canvas) return;
  const data = JSON.parse(element("data").textContent);
  const pen = canvas.getContext("2d");
  const LABELS = () => (canvas.clientWidth < 560 ? 84 : 130);
  const AXIS = 22, ROW = 24, AREA = 40;
  const FORWARD = data.kinds.indexOf("forward"), BACKWARD = data.kinds.indexOf("backward");
  const INPUT = data.kinds.indexOf("input-gradient"), WEIGHT = data.kinds.indexOf("weight-gradient"), UPDATE = data.kinds.indexOf("update");
  let picture, rows = [], from = 0, to = data.ticks, selected = { row: 0, span: -1 };

  function colours() {
    const style = getComputedStyle(document.documentElement);
    return (name) => style.getPropertyValue(`--${name}`).trim();
  }

  function readSpans(row) {
    const spans = [];
    let clock = 0;
    for (let i = 0; i < row.spans.length; i += 3) {
      const start = clock + row.spans[i], end = start + row.spans[i + 1], code = row.spans[i + 2];
      spans.push({ start, end, kind: code % 8, microBatch: Math.floor(code / 8) - 1 });
      clock = end;
    }
    return spans;
  }

  function readSteps(numbers) {
    const steps = [];
    let clock = 0;
    for (let i = 0; i < numbers.length; i += 2) steps.push([(clock += numbers[i]), numbers[i + 1]]);
    return steps;
  }

  function buildRows() {
    rows = picture.devices.map((row) => ({ ...row, type: "spans", height: ROW, spans: readSpans(row) }));
    const areas = [];
    if (element("show-memory").checked) areas.push(...picture.memory.map((row) => ({ ...row, what: "memory" })));
    if (element("show-links").checked) areas.push(...picture.links.map((row) => ({ ...row, what: "link" })));
    for (const row of areas) {
      const capacity = row.capacity ? readSteps(row.capacity) : null;
      rows.push({ ...row, type: "area", height: AREA, steps: readSteps(row.area), bound: capacity });
    }
    let top = AXIS;
    for (const row of rows) { row.top = top; top += row.height; }
    canvas.style.height = `${top + 4}px`;
  }

  const seconds = (ticks) => (ticks / data.ticks) * picture.seconds;
  function time(value) {
    if (value === 0) return "0 s";
    const size = Math.abs(value);
    const [scale, unit] = size >= 1 ? [1, "s"] : size >= 1e-3 ? [1e3, "ms"] : [1e6, "us"];
    return `${Number((value * scale).toPrecision(4))} ${unit}`;
  }
  const x = (ticks) => LABELS() + ((ticks - from) / (to - from)) * (canvas.clientWidth - LABELS() - 6);
  const ticksAt = (px) => from + ((px - LABELS()) / (canvas.clientWidth - LABELS() - 6)) * (to - from);

  function firstAfter(spans, ticks) {
    let low = 0, high = spans.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spans[middle].end < ticks) low = middle + 1; else high = middle;
    }
    return low;
  }

  function draw() {
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const colour = colours();
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    drawAxis(colour, width, height);
    for (const [index, row] of rows.entries()) {
      pen.strokeStyle = colour("line");
      pen.beginPath();
      pen.moveTo(0, row.top + row.height - 0.5);
      pen.lineTo(width, row.top + row.height - 0.5);
      pen.stroke();
      pen.save();
      pen.beginPath();
      pen.rect(LABELS(), row.top, width - LABELS(), row.height);
      pen.clip();
      if (row.type === "spans") drawSpans(row, index, colour, width); else drawArea(row, colour, width);
      pen.restore();
      drawLabel(row, index, colour, width);
    }
    element("window").textContent = `${time(seconds(from))} to ${time(seconds(to))} of ${time(picture.seconds)}`;
  }

  function drawAxis(colour, width, height) {
    const wanted = Math.max(2, Math.floor((width - LABELS()) / 110));
    const raw = seconds(to - from) / wanted;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw);
    pen.fillStyle = colour("soft");
    for (let at = Math.ceil(seconds(from) / step) * step; at <= seconds(to); at += step) {
      const px = x((at / picture.seconds) * data.ticks);
      pen.strokeStyle = colour("line");
      pen.beginPath();
      pen.moveTo(px, AXIS - 6);
      pen.lineTo(px, height);
      pen.stroke();
      pen.fillText(time(Math.abs(at) < step / 1e6 ? 0 : at), px + 3, 9);
    }
  }

  function drawLabel(row, index, colour, width) {
    const chosen = index === selected.row ? colour("accent") : colour("ink");
    pen.fillStyle = chosen;
    pen.fillText(clipped(row.label, LABELS() - (row.type === "area" ? 10 : 26)), 6, row.top + (row.type === "area" ? 12 : ROW / 2));
    pen.fillStyle = colour("soft");
    if (row.type === "area") {
      pen.fillText(row.what, 6, row.top + 28);
      const room = pen.measureText(row.note).width;
      pen.fillStyle = colour("paper");
      pen.globalAlpha = 0.75;
      pen.fillRect(width - room - 14, row.top + row.height - 19, room + 8, 15);
      pen.globalAlpha = 1;
      pen.fillStyle = colour("ink");
      pen.fillText(row.note, width - room - 10, row.top + row.height - 11);
    } else if (row.stage !== null && row.stage !== undefined) pen.fillText(String(row.stage), LABELS() - 18, row.top + ROW / 2);
  }

  function clipped(text, room) {
    let short = text;
    while (short.length > 3 && pen.measureText(short).width > room) short = `${short.slice(0, -2)}…`;
    return short;
  }

  function fillFor(kind, colour) {
    if (kind === FORWARD) return colour("forward");
    if (kind === BACKWARD || kind === INPUT) return colour("backward");
    if (kind === WEIGHT) return colour("weight");
    return colour("update");
  }

  function drawSpans(row, index, colour, width) {
    const first = firstAfter(row.spans, from);
    for (let i = first; i < row.spans.length && row.spans[i].start <= to; i++) {
      const span = row.spans[i], left = x(span.start), right = Math.max(x(span.end), left + 0.7);
      const top = row.top + 3, tall = row.height - 6;
      pen.fillStyle = fillFor(span.kind, colour);
      // Without colour, forwards are low, backwards high, and updates short.
      const low = span.kind === FORWARD ? 4 : 0;
      pen.fillRect(left, top + low, right - left, tall - low);
      if (right - left > 3) {
        pen.strokeStyle = colour("paper");
        pen.strokeRect(left + 0.25, top + low + 0.25, right - left - 0.5, tall - low - 0.5);
      }
      if (right - left > 16 && span.microBatch >= 0) {
        pen.fillStyle = span.kind === FORWARD ? colour("ink") : colour("paper");
        const text = String(span.microBatch);
        if (pen.measureText(text).width < right - left - 3) pen.fillText(text, Math.max(left, LABELS()) + 3, top + tall / 2 + low / 2);
      }
      if (index === selected.row && i === selected.span) {
        pen.strokeStyle = colour("bad");
        pen.lineWidth = 2;
        pen.strokeRect(left, top, Math.max(right - left, 3), tall);
        pen.lineWidth = 1;
      }
    }
  }

  function drawArea(row, colour, width) {
    const bottom = row.top + row.height - 4, tall = row.height - 10;
    const y = (value) => bottom - (value / 1000) * tall;
    pen.fillStyle = colour("amount");
    pen.beginPath();
    pen.moveTo(x(row.steps.length ? row.steps[0][0] : 0), bottom);
    let last = 0;
    for (const [at, value] of row.steps) {
      pen.lineTo(x(at), y(last));
      pen.lineTo(x(at), y(value));
      last = value;
    }
    pen.lineTo(x(data.ticks), y(last));
    pen.lineTo(x(data.ticks), bottom);
    pen.fill();
    pen.strokeStyle = colour("limit");
    pen.setLineDash([4, 3]);
    pen.beginPath();
    const bound = row.bound || [[0, row.limit], [data.ticks, row.limit]];
    bound.forEach(([at, value], i) => {
      if (i) pen.lineTo(x(at), y(bound[i - 1][1]));
      pen.lineTo(x(at), y(value));
    });
    pen.stroke();
    pen.setLineDash([]);
  }

  function describe(row, span) {
    const what = data.kinds[span.kind] + (span.microBatch >= 0 ? ` of micro-batch ${span.microBatch}` : "");
    return `${row.label}${row.note ? ` (${row.note})` : ""}: ${what}, ${time(seconds(span.start))} to ${time(seconds(span.end))}, ${time(seconds(span.end - span.start))} long`;
  }

  function amountAt(row, ticks) {
    let value = 0;
    for (const [at, next] of row.steps) { if (at > ticks) break; value = next; }
    return `${row.label} (${row.what}): ${(value / 10).toFixed(0)} % of the top at ${time(seconds(ticks))}; ${row.note}`;
  }

  function under(event) {
    const box = canvas.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    const index = rows.findIndex((row) => py >= row.top && py < row.top + row.height);
    if (index < 0 || px < LABELS()) return null;
    const ticks = ticksAt(px), row = rows[index];
    if (row.type === "area") return { index, text: amountAt(row, ticks), px, py };
    const at = firstAfter(row.spans, ticks);
    if (at >= row.spans.length || row.spans[at].start > ticks) return { index, text: `${row.label}: waits at ${time(seconds(ticks))}`, px, py };
    return { index, span: at, text: describe(row, row.spans[at]), px, py };
  }

  function show(window0, window1) {
    const least = data.ticks / 5000, size = Math.min(Math.max(window1 - window0, least), data.ticks);
    from = Math.min(Math.max(window0, 0), data.ticks - size);
    to = from + size;
    requestAnimationFrame(draw);
  }

  function zoom(factor, centre = (from + to) / 2) {
    show(centre - (centre - from) * factor, centre + (to - centre) * factor);
  }

  function select(row, span) {
    selected = { row: Math.min(Math.max(row, 0), rows.length - 1), span };
    const chosen = rows[selected.row];
    if (chosen.type === "spans" && span >= 0 && span < chosen.spans.length) {
      const one = chosen.spans[span];
      element("spoken").textContent = describe(chosen, one);
      if (one.start < from || one.end > to) show(one.start - (to - from) / 4, one.start + ((to - from) * 3) / 4);
    } else element("spoken").textContent = chosen.label;
    requestAnimationFrame(draw);
  }

  canvas.addEventListener("keydown", (event) => {
    const pan = (to - from) / 8, row = rows[selected.row];
    const step = (by) => select(selected.row, row.type === "spans" ? Math.min(Math.max(selected.span + by, 0), row.spans.length - 1) : -1);
    const actions = {
      ArrowLeft: () => show(from - pan, to - pan), ArrowRight: () => show(from + pan, to + pan),
      ArrowUp: () => select(selected.row - 1, -1), ArrowDown: () => select(selected.row + 1, -1),
      "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: () => show(0, data.ticks),
      "[": () => step(-1), "]": () => step(1),
    };
    if (actions[event.key]) { actions[event.key](); event.preventDefault(); }
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey && !event.altKey) return;
    event.preventDefault();
    zoom(event.deltaY < 0 || event.deltaX < 0 ? 0.8 : 1.25, ticksAt(event.offsetX));
  }, { passive: false });
  let grabbed = null;
  canvas.addEventListener("pointerdown", (event) => { grabbed = { x: event.clientX, from, to, moved: false }; });
  window.addEventListener("pointerup", (event) => {
    if (grabbed && !grabbed.moved && event.target === canvas) {
      const found = under(event);
      if (found) select(found.index, found.span === undefined ? -1 : found.span);
    }
    grabbed = null;
  });
  canvas.addEventListener("pointermove", (event) => {
    if (grabbed && Math.abs(event.clientX - grabbed.x) > 3) {
      grabbed.moved = true;
      const shift = ((grabbed.x - event.clientX) / (canvas.clientWidth - LABELS())) * (grabbed.to - grabbed.from);
      show(grabbed.from + shift, grabbed.to + shift);
    }
    const found = under(event), tip = element("tip");
    tip.hidden = !found;
    if (found) {
      tip.textContent = found.text.replace(": ", "\n");
      tip.style.left = `${Math.min(found.px + 12, canvas.clientWidth - tip.offsetWidth - 4)}px`;
      tip.style.top = `${found.py + 14}px`;
    }
  });
  canvas.addEventListener("pointerleave", () => { element("tip").hidden = true; });
  canvas.addEventListener("dblclick", (event) => zoom(0.4, ticksAt(event.offsetX)));

  function open(index) {
    picture = data.timelines[index];
    selected = { row: 0, span: -1 };
    element("show-memory").disabled = !picture.memory.length;
    element("show-links").disabled = !picture.links.length;
    buildRows();
    draw();
  }
  element("picture").addEventListener("change", (event) => open(Number(event.target.value)));
  element("zoom-in").addEventListener("click", () => zoom(0.6));
  element("zoom-out").addEventListener("click", () => zoom(1 / 0.6));
  element("reset").addEventListener("click", () => show(0, data.ticks));
  for (const id of ["show-memory", "show-links"]) element(id).addEventListener("change", () => { buildRows(); draw(); });
  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  window.addEventListener("beforeprint", draw);
  const legend = element("kinds");
  for (const [name, colour] of [["forward (low)", "forward"], ["backward (high)", "backward"], ["update", "update"]]) {
    const whole = document.createElement("span"), key = document.createElement("span");
    whole.className = "word";
    key.className = "key";
    key.style.background = `var(--${colour})`;
    whole.append(key, name);
    legend.append(whole, " ");
  }
  open(0);
  document.documentElement.dataset.ready = "yes";
})();
