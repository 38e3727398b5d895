"use strict";
// Everything that comes from the gateway is put in as text, never as markup: names are anybody's.

const HISTORY = 60;
const RETRY_MS = 2000;
const KEY = "phyai-token";
const history = new Map(); // server_id -> {last, rates}
const rows = new Map(); // server_id -> elements of its row
const SVG = "http://www.w3.org/2000/svg";

const byId = (id) => document.getElementById(id);
const number = (value) => Number(value).toLocaleString("en");
const millis = (value) => (value === null ? "–" : value.toFixed(value < 10 ? 2 : 1));

function element(tag, className, text) {
  const found = document.createElement(tag);
  if (className) found.className = className;
  if (text !== undefined) found.textContent = text;
  return found;
}

function headers() {
  const token = sessionStorage.getItem(KEY);
  return token ? { Authorization: "Bearer " + token } : {};
}

function say(state, text) {
  const link = byId("link");
  link.className = "badge " + state;
  link.textContent = text;
  document.body.classList.toggle("stale", state !== "live" && state !== "draining");
}

async function act(method, id, body) {
  const options = { method, headers: headers() };
  if (body) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  const answer = await fetch("v1/backends/" + encodeURIComponent(id), options);
  if (!answer.ok) {
    const found = await answer.json().catch(() => ({}));
    window.alert((found.error && found.error.message) || "HTTP " + answer.status);
  }
}

function track(row) {
  const seen = history.get(row.server_id) || { last: null, rates: [] };
  if (seen.last !== null) seen.rates.push(Math.max(row.requests - seen.last, 0));
  seen.last = row.requests;
  seen.rates.splice(0, seen.rates.length - HISTORY);
  history.set(row.server_id, seen);
  return seen.rates;
}

function path(rates) {
  if (rates.length < 2) return "M0 24L130 24";
  const top = Math.max(...rates, 1);
  const step = 130 / (HISTORY - 1);
  const left = 130 - (rates.length - 1) * step;
  return rates
    .map((rate, i) => `${i ? "L" : "M"}${(left + i * step).toFixed(1)} ${(24 - (22 * rate) / top).toFixed(1)}`)
    .join("");
}

function makeRow(id) {
  const row = element("tr");
  const cells = {};
  const add = (name, className) => row.appendChild((cells[name] = element("td", className)));
  add("model", "name");
  add("endpoint", "endpoint");
  cells.state = element("span", "badge");
  row.appendChild(element("td")).appendChild(cells.state);
  for (const name of ["inflight", "p50", "p99", "requests", "errors"]) add(name, "n");
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", "0 0 130 26");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  cells.spark = svg.appendChild(document.createElementNS(SVG, "path"));
  row.appendChild(element("td")).appendChild(svg);
  add("error", "error");
  const actions = row.appendChild(element("td", "actions"));
  cells.drain = actions.appendChild(element("button", "", "Drain"));
  cells.drain.type = "button";
  cells.drain.addEventListener("click", () =>
    act("PATCH", id, { state: cells.drain.dataset.next }));
  const remove = actions.appendChild(element("button", "", "Remove"));
  remove.type = "button";
  remove.addEventListener("click", () => {
    if (window.confirm("Remove " + cells.endpoint.textContent + " when its requests are answered?"))
      act("DELETE", id);
  });
  byId("backends").appendChild(row);
  return { row, cells };
}

function showBackend(found) {
  if (!rows.has(found.server_id)) rows.set(found.server_id, makeRow(found.server_id));
  const { cells } = rows.get(found.server_id);
  cells.model.textContent = found.model_name;
  cells.endpoint.textContent = found.endpoint;
  cells.state.textContent = found.state;
  cells.state.className = "badge " + found.state;
  cells.inflight.textContent = number(found.in_flight_requests);
  cells.p50.textContent = millis(found.p50_ms);
  cells.p99.textContent = millis(found.p99_ms);
  cells.requests.textContent = number(found.requests);
  cells.errors.textContent = (100 * found.error_rate).toFixed(1) + " %";
  cells.spark.setAttribute("d", path(track(found)));
  cells.error.textContent = found.last_error || "";
  const draining = found.state === "draining";
  cells.drain.textContent = draining ? "Take back" : "Drain";
  cells.drain.dataset.next = draining ? "ready" : "draining";
}

function showModels(models) {
  const cells = (model) => [
    element("td", "name", model.model_name),
    element("td", "n", model.ready + " of " + model.backends),
    ...["in_flight", "queue", "sessions", "requests"].map((key) =>
      element("td", "n", number(model[key]))),
  ];
  byId("models").replaceChildren(...models.map((model) => {
    const row = element("tr");
    row.append(...cells(model));
    return row;
  }));
}

function showTiles(status) {
  const sum = (list, key) => list.reduce((total, item) => total + item[key], 0);
  const ready = status.backends.filter((row) => row.state === "ready").length;
  const tiles = [
    ["backends ready", ready + " / " + status.backends.length],
    ["in flight", number(sum(status.models, "in_flight"))],
    ["waiting", number(sum(status.models, "queue"))],
    ["requests", number(sum(status.models, "requests"))],
    ["failed", number(sum(status.backends, "failures"))],
    ...Object.entries(status.sessions).map(([name, count]) => [name + " sessions", number(count)]),
  ];
  const dropped = Object.entries(status.dropped).filter(([, count]) => count > 0);
  const total = dropped.reduce((found, [, count]) => found + count, 0);
  const why = dropped.map(([name, count]) => number(count) + " " + name).join(", ");
  tiles.push(["observations dropped", number(total), why]);
  byId("tiles").replaceChildren(...tiles.map(([name, value, detail]) => {
    const tile = element("div", "tile");
    tile.append(element("b", "", value), element("span", "quiet", name));
    if (detail) tile.append(element("span", "quiet detail", detail));
    return tile;
  }));
}

function show(status) {
  byId("version").textContent = status.version;
  say(status.draining ? "draining" : "live", status.draining ? "draining" : "live");
  byId("warnings").hidden = status.warnings.length === 0;
  byId("warnings").replaceChildren(...status.warnings.map((text) => element("li", "", text)));
  const present = new Set(status.backends.map((row) => row.server_id));
  for (const [id, { row }] of rows) {
    if (!present.has(id)) {
      row.remove();
      rows.delete(id);
      history.delete(id);
    }
  }
  status.backends.forEach(showBackend);
  byId("no-backends").hidden = status.backends.length > 0;
  showModels(status.models);
  showTiles(status);
}

async function watch() {
  const answer = await fetch("v1/events", { headers: headers(), cache: "no-store" });
  if (answer.status === 401 || answer.status === 403) {
    byId("token-form").hidden = false;
    throw new Error("needs an admin token");
  }
  if (!answer.ok) throw new Error("HTTP " + answer.status);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("gateway ended the connection");
    buffer += value;
    const events = buffer.split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      const line = event.split("\n").find((text) => text.startsWith("data: "));
      if (line) show(JSON.parse(line.slice(6)));
    }
  }
}

async function run() {
  for (;;) {
    try {
      await watch();
    } catch (error) {
      say("lost", error instanceof TypeError ? "gateway is away" : error.message);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

const first = document.querySelector('meta[name="first-figures"]').content;
if (first) show(JSON.parse(first));

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("token").value);
  byId("token").value = "";
  byId("token-form").hidden = true;
});
run();
