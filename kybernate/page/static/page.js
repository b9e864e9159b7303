// Keeps a page current: one stream says which sections have changed; each that is shown is asked for again, and rows that
// are the same stay as they are, with the reader's focus. Without this script the page works, and is reloaded by hand.
"use strict";
(() => {
  const WAIT_MS = 1000;
  const shown = new Map();  // section -> version that is on the page
  const clock = new Intl.DateTimeFormat(undefined, { dateStyle: "short", timeStyle: "medium" });
  const said = document.getElementById("said");
  const dialog = document.getElementById("dialog");

  function say(text) {
    const line = document.createElement("p");
    line.textContent = text;
    said.replaceChildren(line);
    setTimeout(() => line.remove(), 10 * WAIT_MS);
  }

  function local(root) {
    for (const time of root.querySelectorAll("time")) {
      const then = new Date(time.dateTime);
      if (!Number.isNaN(then.valueOf())) time.textContent = clock.format(then);
    }
  }

  // Rows of long lists have a mark, and most are the same as before: what the server sends is read without them, each
  // with an empty one in its place, and of these only those that differ are read in turn.
  const ROW = /<(tr|li) (id="[^"]*" data-mark="[^"]*")[^>]*>[^]*?<\/\1>/g;
  let rows = [];
  function withoutRows(html) {
    rows = [];
    return html.replace(ROW, (row, tag, names) => `<${tag} ${names} data-row="${rows.push(row) - 1}"></${tag}>`);
  }

  function rowOf(empty) {
    const holder = document.createElement("template");
    holder.innerHTML = rows[empty.dataset.row];  // of this page's own templates, which escape each value
    local(holder.content);
    return holder.content.firstElementChild;
  }

  const isRow = (node) => node.dataset?.mark !== undefined;

  // Gives a list the rows of another one: those that are the same stay where they are, with the reader's focus.
  function updateRows(before, after) {
    const there = new Map([...before.children].map((row) => [row.id, row]));
    const wanted = new Set([...after.children].map((row) => row.id));
    for (const [id, row] of there) if (!wanted.has(id)) row.remove();
    let place = before.firstElementChild;
    for (const empty of [...after.children]) {
      let row = there.get(empty.id);
      if (row?.dataset.mark !== empty.dataset.mark) {
        const read = rowOf(empty);
        if (row === place) place = read;
        row?.replaceWith(read);
        row = read;
      }
      if (row === place) place = row.nextElementSibling;
      else before.insertBefore(row, place);
    }
  }

  // Replaces what differs, element by element where both have the same children's ids.
  function update(before, after) {
    if (before.isEqualNode(after)) return;
    const one = [...before.children], other = [...after.children];
    const alike = before.nodeName === after.nodeName && before.cloneNode(false).isEqualNode(after.cloneNode(false));
    if (alike && one.length && other.length && one.every(isRow) && other.every(isRow)) return updateRows(before, after);
    const same = alike && one.length === other.length && one.length > 0 &&
      [...before.childNodes].every((node) => node.nodeType !== 3 || !node.data.trim()) &&
      [...after.childNodes].every((node) => node.nodeType !== 3 || !node.data.trim()) &&
      one.every((child, n) => child.nodeName === other[n].nodeName && child.id === other[n].id);
    if (same) one.forEach((child, n) => update(child, other[n]));
    else before.replaceWith(withRows(after));
  }

  function withRows(element) {
    for (const empty of element.querySelectorAll("[data-row]")) empty.replaceWith(rowOf(empty));
    return element;
  }

  function show(place, html) {
    const open = [...place.querySelectorAll("details[open]")].map((one) => one.closest("[id]")?.id);
    const focused = place.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    const after = place.cloneNode(false), parent = place.parentNode;
    after.append(...html.childNodes);
    local(after);
    update(place, after);
    const now = parent.querySelector("[data-section]");
    for (const id of open) if (id) document.getElementById(id)?.querySelector("details")?.setAttribute("open", "");
    if (focused && document.activeElement === document.body) {
      [...now.querySelectorAll("[aria-label]")].find((one) => one.getAttribute("aria-label") === focused)?.focus();
    }
  }

  async function take(versions) {
    const places = [...document.querySelectorAll("[data-section]")].filter((place) => {
      const name = place.dataset.section;
      return (shown.get(name) ?? place.dataset.version) !== `${versions[name]}`;
    });
    if (!places.length) return;
    const names = places.map((place) => place.dataset.section);
    const answer = await fetch(`/section/${names}?${places[0].dataset.query}`);
    if (answer.status === 401) return location.assign("/login");
    if (!answer.ok) throw new Error(`${answer.status}`);
    const all = document.createElement("template");
    all.innerHTML = withoutRows(await answer.text());
    for (const html of all.content.children) {
      const name = html.dataset.section;
      show(document.querySelector(`main [data-section=${name}]`), html);
      shown.set(name, `${versions[name]}`);
      await new Promise((go) => setTimeout(go));  // input between two long sections has its turn
    }
  }

  // A tab that is not looked at has no stream: a browser has six connections to a host, for all of its tabs.
  let stream = null;
  function follow() {
    if (document.hidden || (stream && stream.readyState !== EventSource.CLOSED)) return;
    stream = new EventSource("/changes");
    let newest = null, busy = false;
    stream.onmessage = async (event) => {
      newest = JSON.parse(event.data);
      if (busy) return;
      busy = true;
      while (newest) {
        const versions = newest;
        newest = null;
        try { await take(versions); document.body.classList.remove("away"); } catch { await new Promise((go) => setTimeout(go, WAIT_MS)); newest ??= versions; }
      }
      busy = false;
    };
    stream.onerror = () => {
      if (!document.body.classList.contains("away")) say("The page's server does not answer. What is shown may be old.");
      document.body.classList.add("away");
      if (stream.readyState === EventSource.CLOSED) setTimeout(again, WAIT_MS);
    };
    stream.onopen = () => { if (document.body.classList.contains("away")) say("The page's server answers again."); document.body.classList.remove("away"); };
  }

  // The stream was refused: the session has ended, or too many tabs have one.
  async function again() {
    const answer = await fetch("/section/status").catch(() => null);
    if (answer?.status === 401) location.assign("/login");
    else follow();
  }

  document.addEventListener("submit", async (event) => {
    const form = event.target;
    if (form.id === "ask") {
      event.preventDefault();
      const answer = await fetch(`/confirm?fragment=1&${new URLSearchParams(new FormData(form, event.submitter))}`);
      if (!answer.ok) return say(await answer.text());
      dialog.innerHTML = await answer.text();
      dialog.showModal();
    } else if (form.closest("dialog")) {
      event.preventDefault();
      const data = new URLSearchParams(new FormData(form));
      data.set("fragment", "1");
      dialog.close();
      const answer = await fetch(form.getAttribute("action"), { method: "POST", body: data });
      const text = await answer.text();
      const part = new DOMParser().parseFromString(text, "text/html").body;
      say(part.textContent.trim());
    } else if (form.id === "chat") {
      event.preventDefault();
      await chat(form);
    }
  });
  document.addEventListener("click", (event) => {
    if (event.target.matches("[data-close]") && dialog.open) { event.preventDefault(); dialog.close(); }
  });

  async function chat(form) {
    const state = document.getElementById("chat-state"), output = document.getElementById("answer");
    const began = performance.now();
    const messages = [{ role: "user", content: form.message.value }];
    output.textContent = "";
    state.textContent = "Waiting for the model, which may have to wake…";
    const answer = await fetch("/chat", { method: "POST", headers: { "x-proof": document.body.dataset.proof }, body: JSON.stringify({ model: form.model.value, messages }) });
    if (!answer.ok) { state.textContent = await answer.text(); return; }
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "", first = true;
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:") || line.includes("[DONE]")) continue;
        const text = JSON.parse(line.slice(5)).choices?.[0]?.delta?.content;
        if (!text) continue;
        if (first) { state.textContent = `The first word came after ${((performance.now() - began) / 1000).toFixed(2)} s.`; first = false; }
        output.append(text);
      }
    }
    if (first) state.textContent = "The model has sent no text.";
  }

  const log = document.getElementById("log");
  if (log) {
    const LINES = 2000;
    const stream = new EventSource(log.dataset.log);
    const state = document.getElementById("log-state");
    stream.onopen = () => { log.replaceChildren(); state.textContent = "Follows what the program writes."; };
    stream.onerror = () => { if (stream.readyState !== EventSource.CLOSED) state.textContent ||= "The output is asked for again."; };
    stream.onmessage = (event) => {
      const end = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
      log.append(`${JSON.parse(event.data)}\n`);
      while (log.childNodes.length > LINES) log.firstChild.remove();
      if (end) log.scrollTop = log.scrollHeight;
    };
    stream.addEventListener("away", (event) => { state.textContent = JSON.parse(event.data); });
    stream.addEventListener("absent", (event) => { state.textContent = JSON.parse(event.data); stream.close(); });
  }

  local(document);
  if (document.querySelector("[data-section]")) {
    follow();
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) stream?.close();
      else follow();
    });
  }
})();
