"use strict";
{  // a block, so that no name meets one of the browser's
const $ = id => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const uni = data.kind === "uni", [low, high] = data.bounds, D = low.length, live = data.live;
const TARGET = [0.88, 0.08, 0.36], CONTACT = [0.07, 0.78, 0.45];
const colour = player => player.name === "repertoire" ? "#b4520a" : "#1f6feb";
const metres = uni ? "" : " m";  // of a distance
const css = (c, alpha) => "rgba(" + c.map(v => Math.round(255 * v)) + "," + alpha + ")";

// ---- the episodes: what every player did from the same start states ----
function floats(text) {
  const letters = atob(text), bytes = new Uint8Array(letters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = letters.charCodeAt(i);
  return new Float32Array(bytes.buffer);  // little-endian, as every machine with a browser is
}
const unpack = players => players.map(player => ({name: player.name,
  episodes: player.episodes.map(e => Object.assign({}, e, {
    positions: floats(e.positions), rotations: floats(e.rotations),
    descriptors: floats(e.descriptors), contacts: e.contacts && floats(e.contacts)}))}));
let target = data.played.target, players = unpack(data.played.players);
const title = player => new Map(live ? live.players : []).get(player.name) || player.name;
const descriptor = (e, i) => [...e.descriptors.subarray(i * D, (i + 1) * D)];
const end = e => descriptor(e, e.steps - 1);
const distance = d => Math.hypot(...d.map((v, k) => v - target[k]));
const brackets = d => "(" + d.map(v => v.toFixed(2).replace("-", "−")).join(", ") + ")";

// ---- vectors and rotations ----
const dot = (a, b) => a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
const add = (a, b, s) => [a[0] + s * b[0], a[1] + s * b[1], a[2] + s * b[2]];
const cross = (a, b) => [
  a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]];
const unit = a => add([0, 0, 0], a, 1 / (Math.hypot(a[0], a[1], a[2]) || 1));
function turn(q, v) {
  const axis = [q[1], q[2], q[3]], t = cross(axis, v).map(x => 2 * x);
  return add(add(v, t, q[0]), cross(axis, t), 1);
}
function body(e, index, step) {  // where a body is at a moment between two steps
  if (index < 0) return {position: [0, 0, 0], rotation: [1, 0, 0, 0]};
  const i = Math.min(Math.floor(step), e.steps - 1), j = Math.min(i + 1, e.steps - 1), s = step - i;
  const at = (array, k, n) => {
    const start = (k * e.bodies + index) * n;
    return array.subarray(start, start + n);
  };
  const p = at(e.positions, i, 3), p2 = at(e.positions, j, 3);
  const q = at(e.rotations, i, 4), q2 = at(e.rotations, j, 4);
  const sign = q[0] * q2[0] + q[1] * q2[1] + q[2] * q2[2] + q[3] * q2[3] < 0 ? -1 : 1;
  const mixed = [0, 1, 2, 3].map(k => (1 - s) * q[k] + s * sign * q2[k]);
  const norm = Math.hypot(...mixed) || 1;
  return {position: [0, 1, 2].map(k => (1 - s) * p[k] + s * p2[k]),
    rotation: mixed.map(v => v / norm)};
}

// ---- the shapes in the world at one moment ----
const plane = data.geoms.find(g => g.shape === "plane");
const ground = plane ? plane.position[2] : 0;
const solids = data.geoms.filter(g => g.shape !== "plane");
function shapes(e, step) {
  const row = Math.min(Math.floor(step), e.steps - 1);
  const lit = new Set(data.feet.filter((_, k) => e.contacts && e.contacts[row * e.feet + k])
    .map(foot => foot[1]));
  return solids.map(g => {
    const b = body(e, g.body, step), direct = v => turn(b.rotation, turn(g.rotation, v));
    const c = add(b.position, turn(b.rotation, g.position), 1);
    const colour = lit.has(g.body) ? CONTACT : g.colour;
    if (g.shape === "box") {
      const axes = [[1, 0, 0], [0, 1, 0], [0, 0, 1]].map(direct);
      const k = g.size.indexOf(Math.max(...g.size)), reach = add([0, 0, 0], axes[k], g.size[k]);
      return {centre: c, axes, half: g.size, colour, radius: Math.min(...g.size),
        from: add(c, reach, -1), to: add(c, reach, 1)};
    }
    const reach = g.shape === "capsule" ? direct([0, 0, g.size[1]]) : [0, 0, 0];
    return {colour, radius: g.size[0], from: add(c, reach, -1), to: add(c, reach, 1)};
  });
}
// The unit of length: the robot's reach, or a fortieth of the plane's width if that is more.
let U = uni ? 0 : (high[0] - low[0]) / 40;
const first = players[0].episodes[0], middle = body(first, 0, 0).position;
for (const s of shapes(first, 0)) for (const tip of [s.from, s.to]) {
  U = Math.max(U, Math.hypot(...add(tip, middle, -1)) + s.radius);
}
function pole() {  // stands where the robot should go
  const top = [...target, ground + 2 * U];
  return uni ? [] : [
    {colour: [1, 0.2, 0.48], radius: 0.05 * U, from: [...target, ground], to: top},
    {colour: [1, 0.2, 0.48], radius: 0.24 * U, from: top, to: top}];
}

// ---- the camera ----
const canvas = $("view"), ctx = canvas.getContext("2d");
const camera = {yaw: uni ? -Math.PI / 2 : 0.3, pitch: uni ? 0.2 : 0.34, zoom: 1, overview: false};
let width = 0, height = 0, eye, right, up, forward, focal;
function aim(e, step) {
  const p = body(e, 0, step).position, start = body(e, 0, 0).position;
  let focus = [p[0], p[1], ground + 0.6 * U], far = (uni ? 3.8 : 6) * U, yaw = camera.yaw;
  if (!uni) {
    // From behind the robot towards the target. Near the target that direction spins, so that the
    // direction from the start is mixed in.
    const back = unit([start[0] - target[0], start[1] - target[1], 0]);
    const k = (camera.overview ? 1e6 : 4) * U;
    yaw += live && camera.overview ? -Math.PI / 2 - 0.3  // as on the map: x to the right, y up
      : Math.atan2(p[1] - target[1] + k * back[1], p[0] - target[0] + k * back[0]);
  }
  if (camera.overview) {
    const points = uni ? [] : live ? [low, high] : [target];  // live: all that can be asked for
    // A race is seen whole, from where all of them start to where the last one comes.
    for (const one of uni ? players.flatMap(player => player.episodes) : [e]) {
      for (let i = 0; i < one.steps; i++) points.push(one.positions.subarray(3 * i * one.bodies));
    }
    const span = [0, 1].map(k => points.map(q => q[k])).map(v => [Math.min(...v), Math.max(...v)]);
    focus = [...span.map(v => (v[0] + v[1]) / 2), ground];
    const reach = 0.5 * Math.hypot(...span.map(v => v[1] - v[0]));
    // A robot that stayed where it was is still all in the picture.
    far = Math.max(live && !uni ? 1.9 * (reach + 0.5 * U) : 2.3 * (reach + 2 * U), 5.5 * U);
  }
  far *= camera.zoom;
  const pitch = Math.min(1.5, camera.pitch + (camera.overview && !uni ? 0.45 : 0));
  const out = [Math.cos(pitch) * Math.cos(yaw), Math.cos(pitch) * Math.sin(yaw), Math.sin(pitch)];
  eye = add(focus, out, far);
  forward = out.map(v => -v);
  right = unit(cross(forward, [0, 0, 1]));
  up = cross(right, forward);
  focal = Math.min(width, 1.25 * height);
  return {focus, far, horizon: height / 2 - focal * Math.tan(pitch)};
}
const turned = v => [dot(v, right), dot(v, up), dot(v, forward)];
const toCamera = p => turned(add(p, eye, -1));
const toScreen = c => [width / 2 + focal * c[0] / c[2], height / 2 - focal * c[1] / c[2]];

// ---- the ground: polygons and lines, cut at the camera's near plane ----
function trace(points, closed) {
  const near = 0.02 * U, seen = points.map(toCamera), n = seen.length;
  let pen = false;
  const put = c => {
    const [x, y] = toScreen(c);
    if (pen) ctx.lineTo(x, y); else ctx.moveTo(x, y);
    pen = true;
  };
  for (let i = 0; i < (closed ? n : n - 1); i++) {
    const a = seen[i], b = seen[(i + 1) % n];
    const cut = () => a.map((v, k) => v + (b[k] - v) * (near - a[2]) / (b[2] - a[2]));
    if (a[2] >= near && (!pen || closed)) put(a);
    if ((a[2] < near) !== (b[2] < near)) { if (!closed && a[2] < near) pen = false; put(cut()); }
    if (!closed && b[2] >= near) put(b);
  }
  if (closed && pen) ctx.closePath();
}
const circle = (x, y, r) => Array.from({length: 40}, (_, i) =>
  [x + r * Math.cos(i * Math.PI / 20), y + r * Math.sin(i * Math.PI / 20), ground]);
function shadow(s, grow) {  // the outline of a capsule seen from above
  const r = s.radius * grow, along = Math.atan2(s.to[1] - s.from[1], s.to[0] - s.from[0]);
  return Array.from({length: 32}, (_, i) => {  // half a circle around each end
    const end = i < 16 ? s.to : s.from, facing = i < 16 ? -0.5 : 0.5;
    const angle = along + Math.PI * (facing + (i % 16) / 15);
    return [end[0] + r * Math.cos(angle), end[1] + r * Math.sin(angle), ground];
  });
}
function drawPath(e, step, style, thick) {
  const path = [];
  for (let i = 0; i <= Math.floor(step); i++) {
    path.push([e.positions[3 * i * e.bodies], e.positions[3 * i * e.bodies + 1], ground]);
  }
  path.push([...body(e, 0, step).position.slice(0, 2), ground]);
  ctx.strokeStyle = ctx.fillStyle = style; ctx.lineWidth = thick; ctx.beginPath();
  trace(path, false); ctx.stroke();
  ctx.beginPath(); trace(circle(path[0][0], path[0][1], 0.13 * U), true); ctx.fill();
}
function drawGround(view) {
  const sky = ctx.createLinearGradient(0, Math.min(view.horizon, 0), 0, Math.max(view.horizon, 1));
  sky.addColorStop(0, "#bcd3e8"); sky.addColorStop(1, "#eef3f7");
  ctx.fillStyle = sky; ctx.fillRect(0, 0, width, height);
  const floor = ctx.createLinearGradient(0, view.horizon, 0, height);
  floor.addColorStop(0, "#eef3f7"); floor.addColorStop(1, "#dbe2e8");
  ctx.fillStyle = floor;
  ctx.fillRect(0, Math.max(view.horizon, 0), width, height);

  const coarser = Math.max(0, Math.round(Math.log2(view.far / U / 8)));
  const tile = 10 ** Math.round(Math.log10(U)) * 2 ** coarser;
  const cx = Math.round(view.focus[0] / tile), cy = Math.round(view.focus[1] / tile), n = 16;
  for (let i = cx - n; i <= cx + n; i++) for (let j = cy - n; j <= cy + n; j++) {
    if ((i + j) & 1) continue;
    const away = Math.hypot((i + 0.5) * tile - view.focus[0], (j + 0.5) * tile - view.focus[1]);
    const fade = 1 - away / (n * tile);
    if (fade <= 0) continue;
    ctx.fillStyle = "rgba(120,140,160," + (0.34 * Math.min(1, 1.6 * fade)).toFixed(3) + ")";
    ctx.beginPath();
    trace([[i, j], [i + 1, j], [i + 1, j + 1], [i, j + 1]]
      .map(c => [c[0] * tile, c[1] * tile, ground]), true);
    ctx.fill();
  }
  ctx.lineJoin = ctx.lineCap = "round";
  if (!uni) {
    ctx.strokeStyle = "rgba(70,90,110,0.5)"; ctx.lineWidth = 1.5; ctx.beginPath();
    trace([[low[0], low[1]], [high[0], low[1]], [high[0], high[1]], [low[0], high[1]]]
      .map(c => [...c, ground]), true);
    ctx.stroke();
    [[0.9, 0.25], [0.55, 0.4], [0.22, 0.9]].forEach(([r, alpha]) => {
      ctx.fillStyle = css(TARGET, alpha); ctx.beginPath();
      trace(circle(target[0], target[1], r * U), true); ctx.fill();
    });
  }
}
function drawShadows(all) {
  for (const grow of [1.3, 1.1, 0.9, 0.7]) {  // all in one fill, so that overlaps are not darker
    ctx.fillStyle = "rgba(25,35,50,0.11)"; ctx.beginPath();
    for (const s of all) trace(shadow(s, grow), true);
    ctx.fill();
  }
}

// ---- the robot: a ray (x, y, 1) from the eye through each pixel, in camera coordinates ----
const layer = document.createElement("canvas"), layerCtx = layer.getContext("2d");
let image, pixels, depth, fine = 2, slow = 0;  // `fine` rays per pixel and axis; 1 if that is slow
function resizeLayer() {
  layer.width = Math.max(1, width * fine); layer.height = Math.max(1, height * fine);
  image = layerCtx.createImageData(layer.width, layer.height);
  pixels = new Uint32Array(image.data.buffer);
  depth = new Float32Array(pixels.length);
}
function extent(s) {  // the rectangle of pixels that the shape can touch
  const balls = s.axes ? [[s.centre, Math.hypot(...s.half)]]
    : [[s.from, s.radius], [s.to, s.radius]];
  const box = [Infinity, Infinity, -Infinity, -Infinity];
  for (const [point, r] of balls) {
    const c = toCamera(point);
    if (c[2] < 1.05 * r) return null;  // the camera is inside or the shape behind it
    const [x, y] = toScreen(c), margin = focal * r / (c[2] - r);
    const mx = margin * (1 + Math.abs(c[0] / c[2])), my = margin * (1 + Math.abs(c[1] / c[2]));
    box[0] = Math.min(box[0], x - mx); box[1] = Math.min(box[1], y - my);
    box[2] = Math.max(box[2], x + mx); box[3] = Math.max(box[3], y + my);
  }
  const x0 = Math.max(0, Math.floor(box[0] * fine)), y0 = Math.max(0, Math.floor(box[1] * fine));
  const x1 = Math.min(layer.width, Math.ceil(box[2] * fine));
  const y1 = Math.min(layer.height, Math.ceil(box[3] * fine));
  return x0 < x1 && y0 < y1 ? [x0, y0, x1, y1] : null;
}
const hit = new Float64Array(4);  // distance and normal of the last ray that met a shape
function meetBall(x, y, c, cc, r) {
  const b = x * c[0] + y * c[1] + c[2], a = x * x + y * y + 1, h = b * b - a * (cc - r * r);
  if (h < 0) return false;
  const t = (b - Math.sqrt(h)) / a;
  hit[0] = t; hit[1] = (t * x - c[0]) / r; hit[2] = (t * y - c[1]) / r; hit[3] = (t - c[2]) / r;
  return t > 0;
}
function meeter(s) {  // the function that sends a ray to this shape
  if (s.axes) {
    const c = toCamera(s.centre), axes = s.axes.map(turned);
    const offset = axes.map(a => dot(a, c));
    return (x, y) => {  // the ray is inside the box where it is inside all three slabs
      let enter = 0, leave = Infinity, side = -1, sign = 0;
      for (let k = 0; k < 3; k++) {
        const a = axes[k], speed = a[0] * x + a[1] * y + a[2];
        const t0 = (offset[k] - s.half[k]) / speed, t1 = (offset[k] + s.half[k]) / speed;
        if (Math.min(t0, t1) > enter) {
          enter = Math.min(t0, t1); side = k; sign = speed > 0 ? -1 : 1;
        }
        leave = Math.min(leave, Math.max(t0, t1));
      }
      if (side < 0 || enter > leave) return false;
      hit[0] = enter;
      for (let k = 0; k < 3; k++) hit[k + 1] = sign * axes[side][k];
      return true;
    };
  }
  const a = toCamera(s.from), b = toCamera(s.to), d = add(b, a, -1), r = s.radius;
  const aa = dot(a, a), bb = dot(b, b), dd = dot(d, d), da = dot(d, a);
  const C = dd * (aa - r * r) - da * da;
  if (dd < 1e-12) return (x, y) => meetBall(x, y, a, aa, r);
  return (x, y) => {  // the cylinder around the axis, or the ball at the end beyond which it is met
    const dr = d[0] * x + d[1] * y + d[2], ar = a[0] * x + a[1] * y + a[2];
    const A = dd * (x * x + y * y + 1) - dr * dr, B = dd * ar - da * dr, h = B * B - A * C;
    if (h < 0) return false;
    const t = (B - Math.sqrt(h)) / A, along = t * dr - da;
    if (!(along > 0)) return meetBall(x, y, a, aa, r);
    if (along >= dd) return meetBall(x, y, b, bb, r);
    const f = along / dd;
    hit[0] = t;
    hit[1] = (t * x - a[0] - f * d[0]) / r;
    hit[2] = (t * y - a[1] - f * d[1]) / r;
    hit[3] = (t - a[2] - f * d[2]) / r;
    return t > 0;
  };
}
function drawSolids(all, alpha) {
  const seen = all.map(s => [s, extent(s)]).filter(pair => pair[1]);
  if (!seen.length) return;
  const [left, top, end, bottom] = seen.map(pair => pair[1]).reduce((a, b) =>
    [Math.min(a[0], b[0]), Math.min(a[1], b[1]), Math.max(a[2], b[2]), Math.max(a[3], b[3])]);
  // Empty beyond its border, too: smoothing mixes in what lies there, such as an older picture.
  const west = Math.max(0, left - 2), east = Math.min(layer.width, end + 2);
  const north = Math.max(0, top - 2), south = Math.min(layer.height, bottom + 2);
  for (let j = north; j < south; j++) {
    pixels.fill(0, j * layer.width + west, j * layer.width + east);
    depth.fill(Infinity, j * layer.width + west, j * layer.width + east);
  }
  const sky = turned([0, 0, 1]), sun = unit(add([-0.45, 0.15, -0.6], sky, 0.75));
  const gleam = unit(add(sun, [0, 0, -1], 1));
  for (const [s, [x0, y0, x1, y1]] of seen) {
    const meet = meeter(s), [red, green, blue] = s.colour.map(v => 255 * v);
    for (let j = y0; j < y1; j++) {
      const y = (height / 2 - (j + 0.5) / fine) / focal;
      for (let i = x0, at = j * layer.width + x0; i < x1; i++, at++) {
        if (!meet(((i + 0.5) / fine - width / 2) / focal, y) || hit[0] >= depth[at]) continue;
        depth[at] = hit[0];
        const day = hit[1] * sky[0] + hit[2] * sky[1] + hit[3] * sky[2];
        const light = 0.52 + 0.16 * day
          + 0.5 * Math.max(0, hit[1] * sun[0] + hit[2] * sun[1] + hit[3] * sun[2]);
        const mirror = Math.max(0, hit[1] * gleam[0] + hit[2] * gleam[1] + hit[3] * gleam[2]);
        const shine = 70 * mirror ** 40;
        pixels[at] = 0xff000000 | Math.min(255, blue * light + shine) << 16
          | Math.min(255, green * light + shine) << 8 | Math.min(255, red * light + shine);
      }
    }
  }
  layerCtx.putImageData(image, 0, 0, west, north, east - west, south - north);
  const w = end - left, h = bottom - top;
  ctx.globalAlpha = alpha;
  ctx.drawImage(layer, left, top, w, h, left / fine, top / fine, w / fine, h / fine);
  ctx.globalAlpha = 1;
}
function drawLabel() {
  const c = toCamera([...target, ground + 2.45 * U]);
  if (uni || c[2] < 0.1 * U) return;
  const text = "target " + brackets(target), [x, y] = toScreen(c);
  if (x < 0 || x > width) return;
  ctx.font = FONT;  // all of it in the picture, and below the name of who plays
  const half = Math.min(width / 2, ctx.measureText(text).width / 2 + 6);
  const top = players.length > 1 ? 46 : 20;
  write(text, Math.max(half, Math.min(width - half, x)), Math.max(top, y), "center", "#c40d50");
}
const FONT = "600 14px system-ui, sans-serif";
function write(text, x, y, align, style) {
  ctx.font = FONT; ctx.textAlign = align; ctx.lineWidth = 4;
  ctx.strokeStyle = "rgba(255,255,255,0.9)"; ctx.strokeText(text, x, y);
  ctx.fillStyle = style; ctx.fillText(text, x, y);
}
function drawView(player, step) {  // the robot from its start, and its other starts as ghosts
  const e = player.episodes[state.start], robot = shapes(e, step), view = aim(e, step);
  const others = state.ghosts ? player.episodes.filter(other => other !== e) : [];
  drawGround(view);
  if (!uni || camera.overview) {
    for (const other of others) drawPath(other, step, "rgba(90,105,120,0.35)", 2);
    drawPath(e, step, colour(player), 4);
  }
  drawShadows([...robot, ...pole()]);
  drawSolids(others.flatMap(other => shapes(other, step)), 0.3);
  drawSolids([...robot, ...pole()], 1);
  drawLabel();
  if (players.length > 1) write(title(player), 14, 24, "left", colour(player));
}

// ---- the chart of the descriptor space ----
const chart = $("chart"), pen = chart.getContext("2d");
const foot = k => data.feet[k] ? data.feet[k][0] : "foot " + (k + 1);
const names = uni ? [0, 1].map(k => foot(k) + " on the ground (share of steps)") : ["x (m)", "y (m)"];
function barHeight(v, k) {
  return 12 + (chart.clientWidth - 44) * (high[k] - v) / (high[k] - low[k]);
}
function drawBars(row) {  // for other than two dimensions: how far each has come, with the target
  const size = chart.clientWidth, gap = size / D, Y = barHeight;
  pen.clearRect(0, 0, size, size);
  pen.textAlign = "center"; pen.font = "12px system-ui, sans-serif";
  (wish || target).forEach((goal, k) => {
    const x = (k + 0.25) * gap, w = gap / 2;
    pen.fillStyle = "#e4e9ee"; pen.fillRect(x, Y(high[k], k), w, Y(low[k], k) - Y(high[k], k));
    players.forEach((player, i) => {
      const here = descriptor(player.episodes[state.start], row)[k], share = w / players.length;
      pen.fillStyle = colour(player);
      pen.fillRect(x + i * share, Y(here, k), share, Y(low[k], k) - Y(here, k));
    });
    pen.fillStyle = css(TARGET, 1); pen.fillRect(x - 6, Y(goal, k) - 2, w + 12, 4);
    pen.fillStyle = "#5b6b7a"; pen.fillText(foot(k), x + w / 2, size - 13);
  });
}
const PAD = 46, span = () => chart.clientWidth - PAD - 12;  // of the map inside its labels
const X = v => PAD + span() * (v - low[0]) / (high[0] - low[0]);
const Y = v => 12 + span() * (high[1] - v) / (high[1] - low[1]);
function drawChart(row) {
  const size = chart.clientWidth;
  const ring = (d, r, style) => {
    pen.strokeStyle = style; pen.beginPath(); pen.arc(X(d[0]), Y(d[1]), r, 0, 7); pen.stroke();
  };
  const disc = (d, r, fill) => {
    pen.fillStyle = fill; pen.beginPath(); pen.arc(X(d[0]), Y(d[1]), r, 0, 7); pen.fill();
  };
  pen.clearRect(0, 0, size, size);
  const background = accuracyMap();
  if (background) pen.drawImage(background, PAD, 12, span(), span());
  pen.font = "12px system-ui, sans-serif"; pen.lineWidth = 1; pen.fillStyle = "#5b6b7a";
  for (let k = 0; k <= 4; k++) {
    const x = low[0] + k / 4 * (high[0] - low[0]), y = low[1] + k / 4 * (high[1] - low[1]);
    pen.strokeStyle = k % 4 ? "rgba(90,110,130,0.16)" : "#9aa8b5"; pen.beginPath();
    pen.moveTo(X(x), Y(low[1])); pen.lineTo(X(x), Y(high[1]));
    pen.moveTo(X(low[0]), Y(y)); pen.lineTo(X(high[0]), Y(y)); pen.stroke();
    if (k % 2) continue;
    pen.textAlign = "center"; pen.fillText(+x.toPrecision(3), X(x), Y(low[1]) + 15);
    pen.textAlign = "right"; pen.fillText(+y.toPrecision(3), X(low[0]) - 5, Y(y) + 4);
  }
  pen.textAlign = "center"; pen.fillText(names[0], X((low[0] + high[0]) / 2), size - 13);
  pen.save(); pen.translate(11, Y((low[1] + high[1]) / 2)); pen.rotate(-Math.PI / 2);
  pen.fillText(names[1], 0, 0); pen.restore();

  pen.lineWidth = 1.5;
  for (const point of past) {  // what was asked for, and what came of it
    pen.strokeStyle = "rgba(40,50,60,0.5)"; pen.beginPath();
    pen.moveTo(X(point.target[0]), Y(point.target[1]));
    pen.lineTo(X(point.reached[0]), Y(point.reached[1])); pen.stroke();
    ring(point.target, 4, css(TARGET, 0.75)); disc(point.reached, 2.5, point.colour);
  }
  for (const player of players) for (const e of player.episodes) {
    if (e !== player.episodes[state.start]) disc(end(e), 3.5, "#8d9baa");
  }
  for (const player of players) {
    const e = player.episodes[state.start], here = descriptor(e, row);
    pen.strokeStyle = css(TARGET, 0.6); pen.setLineDash([4, 4]); pen.lineWidth = 1.5;
    pen.beginPath(); pen.moveTo(X(here[0]), Y(here[1])); pen.lineTo(X(target[0]), Y(target[1]));
    pen.stroke(); pen.setLineDash([]);
    pen.strokeStyle = colour(player); pen.lineWidth = 2; pen.lineJoin = "round";
    const line = (from, to, alpha) => {
      pen.globalAlpha = alpha; pen.beginPath();
      for (let i = from; i <= to; i++) { const d = descriptor(e, i); pen.lineTo(X(d[0]), Y(d[1])); }
      pen.stroke(); pen.globalAlpha = 1;
    };
    // Shares of a few steps jump from edge to edge of the map: they are only hinted at.
    const settled = uni ? Math.min(row, Math.floor(e.steps / 10)) : 0;
    line(0, settled, 0.25); line(settled, row, 1);
    disc(here, 6.5, "#fff"); disc(here, 5, colour(player));
  }
  pen.lineWidth = 2.5;
  ring(target, 9, css(TARGET, 1)); disc(target, 3, css(TARGET, 1));
  if (wish) { pen.setLineDash([3, 3]); ring(wish, 9, css(TARGET, 1)); pen.setLineDash([]); }
}
// The map's background: every pixel in the colour of the goal that is nearest to it.
const NEAR = [222, 243, 231], FAR = [118, 128, 140];
let drawnMap = {};
function accuracyMap() {
  const size = Math.round(span()), who = live && live.accuracy && askedPlayers()[0];
  const distances = who && live.accuracy.distance[who];
  if (!distances || size < 1) return null;
  if (drawnMap.who === who && drawnMap.size === size) return drawnMap.map;
  const known = distances.filter(v => v !== null), [best, worst] = range(known);
  const map = document.createElement("canvas"), paper = map.getContext("2d");
  map.width = map.height = size;
  const picture = paper.createImageData(size, size);
  for (let j = 0; j < size; j++) for (let i = 0; i < size; i++) {
    const x = low[0] + (i + 0.5) / size * (high[0] - low[0]);
    const y = high[1] - (j + 0.5) / size * (high[1] - low[1]);
    let nearest = 0, least = Infinity;
    live.accuracy.goals.forEach((goal, k) => {
      const far = (goal[0] - x) ** 2 + (goal[1] - y) ** 2;
      if (far < least) { least = far; nearest = k; }
    });
    const value = distances[nearest], s = (value - best) / (worst - best || 1);
    const shade = value === null ? [255, 255, 255] : NEAR.map((v, c) => v + s * (FAR[c] - v));
    picture.data.set([...shade, 255], 4 * (j * size + i));
  }
  paper.putImageData(picture, 0, 0);
  drawnMap = {who, size, map};
  $("whose").textContent = title({name: who});
  $("near").textContent = best.toFixed(2) + metres; $("far").textContent = worst.toFixed(2) + metres;
  return map;
}
const range = values => [Math.min(...values), Math.max(...values)];

// ---- playing ----
const state = {start: 0, time: 0, playing: true, ghosts: false, dirty: true};
const length = () => (players[0].episodes[0].steps - 1) * data.dt;
function fit(element, context) {
  const scale = Math.min(window.devicePixelRatio || 1, 2);
  element.width = Math.max(1, element.clientWidth * scale);
  element.height = Math.max(1, element.clientHeight * scale);
  context.setTransform(scale, 0, 0, scale, 0, 0);
}
// Players side by side, or one above the other on a high screen.
const stacked = () => canvas.clientHeight > canvas.clientWidth;
const corner = k => stacked() ? [0, k * height] : [k * width, 0];
function resize() {
  fit(canvas, ctx); fit(chart, pen);
  const parts = players.length;
  width = canvas.clientWidth / (stacked() ? 1 : parts);
  height = canvas.clientHeight / (stacked() ? parts : 1);
  resizeLayer(); draw();  // at once: a canvas that changes its size is empty until it is drawn
}
function draw() {
  const last = players[0].episodes[0].steps - 1, step = Math.min(state.time / data.dt, last);
  const row = Math.floor(step + 1e-6);
  players.forEach((player, k) => {
    const [x, y] = corner(k);
    ctx.save(); ctx.translate(x, y); ctx.beginPath(); ctx.rect(0, 0, width, height); ctx.clip();
    drawView(player, step);
    if (k) { ctx.fillStyle = "#b8c3ce"; ctx.fillRect(0, 0, x ? 1 : width, x ? height : 1); }
    ctx.restore();
  });
  if (D === 2) drawChart(row); else drawBars(row);
  tell("now", e => brackets(descriptor(e, row)));
  tell("left", e => distance(descriptor(e, row)).toFixed(3) + metres);
  $("time").value = state.time;
  $("clock").textContent = state.time.toFixed(1) + " / " + length().toFixed(1) + " s";
  $("play").textContent = state.playing ? "Pause" : state.time >= length() ? "Replay" : "Play";
  $("camera").textContent = camera.overview ? "Follow" : "Overview";
  const { contacts, feet } = players[0].episodes[state.start];
  [...$("lamps").children].forEach((lamp, k) => {
    lamp.classList.toggle("on", contacts[row * feet + k] !== 0);
    const share = d => (100 * d[k]).toFixed(0) + " %";
    const here = players.map(player => share(descriptor(player.episodes[state.start], row)));
    lamp.textContent = foot(k)
      + (k < D ? ": " + here.join(" and ") + " (target " + share(target) + ")" : "");
  });
}
function tell(id, text) {  // a line for every player, in its colour where there are several
  $(id).replaceChildren(...players.map(player => {
    const line = document.createElement("div");
    line.textContent = text(player.episodes[state.start]);
    if (players.length > 1) line.style.color = colour(player);
    return line;
  }));
}
function choose(start, time) {
  state.start = start; state.time = time; state.dirty = true;
  const e = players[0].episodes[start];
  $("episode").value = start; $("time").max = length();
  tell("reached", e => brackets(end(e)));
  tell("distance", e => distance(end(e)).toFixed(3) + metres);
  $("lamps").replaceChildren(...Array.from({length: uni ? e.feet : 0},
    () => document.createElement("li")));
}
function show(time) {  // what was played last, from some moment on
  const starts = players[0].episodes.map((_, i) => players.map(p => p.episodes[i]));
  $("target").textContent = brackets(target);
  $("episode").replaceChildren(...starts.map((episodes, i) => new Option("start state " + (i + 1)
    + ": distance " + episodes.map(e => distance(end(e)).toFixed(2)).join(" and ") + metres, i)));
  $("haunted").hidden = $("others").hidden = starts.length < 2;
  choose(Math.min(state.start, starts.length - 1), time);
}
function seek(time) {
  state.time = Math.max(0, Math.min(length(), time)); state.playing = false; state.dirty = true;
}
function toggle() {
  if (!state.playing && state.time >= length()) state.time = 0;
  state.playing = !state.playing; state.dirty = true;
}
let last = null;
function frame(now) {
  if (state.playing && last !== null) {
    const later = state.time + Math.min(0.1, (now - last) / 1000) * Number($("speed").value);
    state.time = fork === null ? later : Math.max(state.time, Math.min(later, fork));
    if (state.time >= length()) { state.time = length(); state.playing = false; }
    state.dirty = true;
  }
  last = now;
  if (state.dirty) {
    state.dirty = false;
    const start = performance.now();
    draw();
    slow = 0.9 * slow + 0.1 * (performance.now() - start);
    if (slow > 25 && fine > 1) { fine = 1; resizeLayer(); }
  }
  requestAnimationFrame(frame);
}


// ---- live: another target is asked for, one at a time ----
const past = [];
let wish = null, asking = false;  // what is asked for and not yet answered
let course = [target], steering = false;  // targets of the parts so far; whether the wish continues them
let fork = null, took = 0;  // until when the answer will be like what is shown; seconds of the last one
const askedPlayers = () => $("who").value.split("+");
const say = text => { $("status").textContent = text; };
async function ask(next, steer) {
  wish = next; steering = steer; state.dirty = true;
  if (asking) return;  // the newest wish follows when the answer is here; older ones are forgotten
  asking = true;
  while (wish) {
    const asked = wish, continued = steering, start = performance.now();
    const targets = continued ? turnTowards(asked) : [asked];
    if (targets) {
      if (!continued) say("Asking for " + brackets(asked) + " …");
      const problem = await play(targets, continued);
      took = (performance.now() - start) / 1000;
      say(problem || outcome() + `, played in ${Math.round(1000 * took)} ms.`);
    }
    fork = null;
    if (wish === asked) wish = null;
    state.dirty = true;
  }
  asking = false;
}
function outcome() {  // of the start that is shown, and on average of all
  const told = of => players.map(of).map(far => far.toFixed(2)).join(" and ") + metres;
  const far = e => distance(end(e)), starts = players[0].episodes.length;
  const mean = told(p => p.episodes.reduce((sum, e) => sum + far(e), 0) / starts);
  return `${brackets(target)}: distance ${told(p => far(p.episodes[state.start]))}`
    + (starts > 1 ? `, mean of ${starts} starts ${mean}` : "");
}
// The way so far stays; from a part on that begins when the answer can be here, the target is another.
function turnTowards(point) {
  const steps = players[0].episodes[0].steps - 1;
  const soon = (state.time + took * Number($("speed").value)) / data.dt;
  const part = Math.floor(soon * live.parts / steps) + 1;
  if (!state.playing || part >= live.parts) return null;
  fork = Math.ceil(part * steps / live.parts) * data.dt;
  return [...Array.from({length: part}, (_, i) => course[Math.min(i, course.length - 1)]), point];
}
async function play(targets, continued) {  // the sentence that says why not, if it was not played
  const answer = await fetch("play", {
    method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify({
      targets, players: askedPlayers(), seed: $("seed").valueAsNumber,
      noise: $("noise").checked})}).catch(() => null);
  if (!answer) return "The server does not answer; was it ended?";
  if (!answer.ok) return answer.text();
  const played = await answer.json();
  const before = players.length;
  target = played.target; players = unpack(played.players); course = targets;
  state.playing = true;
  show(continued ? state.time : 0);
  if (continued) past.splice(-before);  // it is still the same episode
  for (const player of players) {
    past.push({target, reached: end(player.episodes[state.start]), colour: colour(player)});
  }
  past.splice(0, past.length - 200);
  if (players.length !== before) resize();
  return "";
}
function within(element, event) {  // where the mouse is
  const box = element.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}
function onMap(event) {  // the descriptor under the mouse
  const [x, y] = within(chart, event);
  if (D !== 2) {
    const k = Math.max(0, Math.min(D - 1, Math.floor(x / chart.clientWidth * D)));
    const share = (y - barHeight(high[k], k)) / (barHeight(low[k], k) - barHeight(high[k], k));
    return target.map((v, i) => i === k ? high[k] - share * (high[k] - low[k]) : v);
  }
  return [low[0] + (x - PAD) / span() * (high[0] - low[0]),
    high[1] - (y - 12) / span() * (high[1] - low[1])];
}
function onGround(event) {  // the place on the ground under the mouse
  const [x, y] = within(canvas, event);
  const k = Math.min(players.length - 1, Math.floor(stacked() ? y / height : x / width));
  const [left, top] = corner(k), e = players[k].episodes[state.start];
  aim(e, Math.min(state.time / data.dt, e.steps - 1));
  const ray = add(add(forward, right, (x - left - width / 2) / focal),
    up, (height / 2 - (y - top)) / focal);
  return ray[2] < 0 ? add(eye, ray, (ground - eye[2]) / ray[2]).slice(0, 2) : null;
}
function wishFor(point, steer) {  // a click a little beside the border means the border
  const beside = (v, k) => Math.abs(v - (low[k] + high[k]) / 2) > 0.54 * (high[k] - low[k]);
  if (!point || point.some(beside)) say("That lies outside the space of behaviours.");
  else ask(point.map((v, k) => Math.max(low[k], Math.min(high[k], v))), steer);
}
$("key").hidden = D !== 2;
if (live) {
  document.body.classList.add("live");
  for (const [name, label] of live.players) $("who").add(new Option(label, name));
  if (live.players.length > 1) {
    document.body.classList.add("several");
    $("who").add(new Option("both", live.players.map(pair => pair[0]).join("+")));
  }
  $("seed").value = live.seed;
  $("noise").checked = live.noise > 0; $("noisy").hidden = !(live.noise > 0);
  $("live").hidden = $("status").hidden = false;
  $("legend").hidden = !live.accuracy || D !== 2;
  say("Click on the map" + (uni ? "" : " or on the ground")
    + (uni ? ": the robot runs with its feet that often on the ground." : ": the robot goes there."));
  chart.addEventListener("click", event => wishFor(onMap(event), false));
  chart.addEventListener("pointermove", event => {
    if ($("follow").checked && state.playing) wishFor(onMap(event), true);
  });
  $("live").addEventListener("submit", event => event.preventDefault());
  $("live").addEventListener("change", event => {
    if (event.target === $("follow")) return;
    // again, and not the same as before
    if ($("live").reportValidity()) ask([...(wish || target)], false);
  });
}

$("ghosts").addEventListener("change", event => {
  state.ghosts = event.target.checked; state.dirty = true;
});
$("episode").addEventListener("change", event => {
  choose(Number(event.target.value), 0); state.playing = true;
});
$("play").addEventListener("click", toggle);
$("time").addEventListener("input", event => seek(Number(event.target.value)));
$("camera").addEventListener("click", () => {
  camera.overview = !camera.overview; state.dirty = true;
});
window.addEventListener("keydown", event => {
  if (["SELECT", "BUTTON", "INPUT"].includes(event.target.tagName)) return;
  if (event.key === " ") { toggle(); event.preventDefault(); }
  if (event.key === "ArrowRight") seek(state.time + data.dt);
  if (event.key === "ArrowLeft") seek(state.time - data.dt);
});
const zoom = factor => {
  camera.zoom = Math.max(0.3, Math.min(8, camera.zoom * factor)); state.dirty = true;
};
canvas.addEventListener("wheel", event => {
  zoom(Math.exp(Math.sign(event.deltaY) * Math.min(Math.abs(event.deltaY), 100) * 0.0015));
  event.preventDefault();
}, {passive: false});
const fingers = new Map();
let travelled = 0;  // pixels since the first finger came down: a click has none
const apart = () => {
  const [a, b] = [...fingers.values()]; return Math.hypot(a[0] - b[0], a[1] - b[1]) || 1;
};
canvas.addEventListener("pointerdown", event => {
  canvas.setPointerCapture(event.pointerId);
  travelled = fingers.size ? Infinity : 0;
  fingers.set(event.pointerId, [event.clientX, event.clientY]);
});
canvas.addEventListener("pointermove", event => {
  const before = fingers.get(event.pointerId);
  if (!before) return;
  const gap = fingers.size === 2 ? apart() : 0;
  fingers.set(event.pointerId, [event.clientX, event.clientY]);
  if (fingers.size === 2) { zoom(gap / apart()); return; }
  travelled += Math.hypot(event.clientX - before[0], event.clientY - before[1]);
  camera.yaw -= (event.clientX - before[0]) * 0.008;
  // never below the ground, which is drawn as seen from above
  camera.pitch = Math.max(0.04, Math.min(1.5, camera.pitch + (event.clientY - before[1]) * 0.006));
  state.dirty = true;
});
canvas.addEventListener("click", event => {
  if (live && !uni && travelled < 5) wishFor(onGround(event), false);
});
for (const name of ["pointerup", "pointercancel"]) {
  canvas.addEventListener(name, event => fingers.delete(event.pointerId));
}
new ResizeObserver(resize).observe($("stage"));

show(0);
// #episode=2&time=3.5 opens the page at that moment: for links and for pictures
const asked = new URLSearchParams(location.hash.slice(1));
if (asked.has("episode")) {
  const starts = players[0].episodes.length;
  choose(Math.max(1, Math.min(starts, Math.floor(Number(asked.get("episode"))) || 1)) - 1, 0);
}
if (asked.has("overview")) camera.overview = true;
if (asked.has("time")) seek(Number(asked.get("time")) || 0);
resize();
requestAnimationFrame(frame);
}
