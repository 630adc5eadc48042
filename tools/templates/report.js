"use strict";
(() => {
  const find = (selector, from = document) => from.querySelector(selector);
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const make = (tag, text = "", name = "") => {
    const made = document.createElement(tag);
    made.textContent = text; // never innerHTML: texts come from files
    if (name) made.className = name;
    return made;
  };

  // Theme: the system's until the button is pressed. Storage may be refused to a page opened from disk.
  const themes = ["auto", "light", "dark"];
  const remembered = () => { try { return localStorage.getItem("moe-ep-theme"); } catch { return null; } };
  const setTheme = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    find("#theme").textContent = `theme: ${theme}`;
    try { localStorage.setItem("moe-ep-theme", theme); } catch { /* the choice lasts as long as the page */ }
  };
  let theme = themes.includes(remembered()) ? remembered() : "auto";
  find("#theme").hidden = false;
  setTheme(theme);
  find("#theme").addEventListener("click", () => setTheme(theme = themes[(themes.indexOf(theme) + 1) % themes.length]));

  // Stale: asked again when the page is looked at, for it may have been made long before.
  const banners = all(".banner");
  const hoursOld = (banner) => (Date.now() - Date.parse(banner.dataset.newest)) / 3.6e6;
  const isStale = (banner) => hoursOld(banner) > Number(banner.dataset.hours);
  const everything = banners.length > 0 && isStale(banners[0]);
  banners.forEach((banner) => {
    banner.hidden = "section" in banner.dataset ? everything || !isStale(banner) : !everything;
    const age = hoursOld(banner);
    find("span", banner).textContent += age < 96 ? ` (${Math.round(age)} hours ago)` : ` (${Math.round(age / 24)} days ago)`;
  });

  // Words at the pointer, and one series alone.
  const tip = find("#tip");
  document.addEventListener("pointermove", (event) => {
    const told = event.target.closest ? event.target.closest("[data-tip]") : null;
    tip.hidden = !told;
    if (!told) return;
    tip.textContent = told.dataset.tip;
    tip.style.left = `${Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${event.clientY > innerHeight - 60 ? event.clientY - 34 : event.clientY + 14}px`;
  });
  all(".legend button").forEach((button) => button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
    const lit = new Set(all('.legend button[aria-pressed="true"]').map((each) => each.dataset.series));
    document.body.classList.toggle("dim", lit.size > 0);
    all(".series").forEach((series) => series.classList.toggle("lit", lit.has(series.dataset.series)));
  }));

  const openTarget = () => {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const box = target && target.closest("details");
    if (box) { box.open = true; target.scrollIntoView(); }
  };
  addEventListener("hashchange", openTarget);
  openTarget();

  const copyText = async (text) => {
    try { await navigator.clipboard.writeText(text); } catch { // no permission: the old way
      const area = make("textarea", text);
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
  };
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button.copy");
    if (!button) return;
    await copyText(button.dataset.copy);
    const before = button.textContent;
    button.textContent = "copied";
    setTimeout(() => { button.textContent = before; }, 1200);
  });

  // All rows: sorted, filtered and shown a page at a time, so that ten thousand of them stay quick.
  const source = find("#rows");
  if (!source) return;
  const { columns, words, rows } = JSON.parse(source.textContent);
  const PAGE = 100;
  const kindOf = columns.map(([, kind]) => kind);
  const column = (heading) => columns.findIndex(([name]) => name === heading);
  const statusAt = column("status"), checkAt = column("check"), reasonAt = column("reason");
  const value = (row, at) => kindOf[at] === "t" ? words[row[at]] : kindOf[at] === "r" ? row[at].map((n) => words[n]).join(" ") : row[at];
  const haystacks = rows.map((row) => columns.map((_, at) => kindOf[at] === "r" ? "" : value(row, at) ?? "").join(" ").toLowerCase());
  const statuses = new Set();
  let sortAt = -1, direction = 1, limit = PAGE, chosen = [];

  const compare = (a, b) => {
    const x = value(rows[a], sortAt), y = value(rows[b], sortAt);
    if (x === y) return a - b;
    if (x === null || x === "") return 1; // blanks last, whichever way
    if (y === null || y === "") return -1;
    return (x < y ? -1 : 1) * direction;
  };
  const line = (row) => {
    const made = make("tr");
    columns.forEach(([, kind], at) => {
      const shown = value(row, at);
      if (kind === "r") {
        const cell = make("td");
        if (shown) {
          const button = make("button", "copy repro", "copy");
          button.type = "button";
          button.dataset.copy = button.title = shown;
          cell.append(button);
        }
        made.append(cell);
      } else if (at === statusAt) {
        const cell = make("td");
        cell.append(make("span", shown, `tag ${shown}`));
        made.append(cell);
      } else {
        made.append(make("td", shown ?? "", kind === "n" ? "n" : at === reasonAt ? "reason" : ""));
      }
    });
    return made;
  };
  const show = () => {
    find("#table tbody").replaceChildren(...chosen.slice(0, limit).map((index) => line(rows[index])));
    find("#shown").textContent = `${Math.min(limit, chosen.length)} of ${chosen.length} rows`;
    find("#more").hidden = chosen.length <= limit;
  };
  const choose = () => {
    const wanted = find("#filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    chosen = rows.map((_, index) => index).filter((index) =>
      (!statuses.size || statuses.has(value(rows[index], statusAt))) && wanted.every((word) => haystacks[index].includes(word)));
    if (sortAt >= 0) chosen.sort(compare);
    show();
  };

  const head = make("tr");
  columns.forEach(([heading, kind], at) => {
    const cell = make("th", heading, kind === "n" ? "n" : "");
    cell.tabIndex = 0;
    const sort = () => {
      direction = sortAt === at ? -direction : 1;
      sortAt = at;
      all("th", head).forEach((each) => each.removeAttribute("aria-sort"));
      cell.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      choose();
    };
    cell.addEventListener("click", sort);
    cell.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
    head.append(cell);
  });
  find("#table thead").append(head);
  const counts = new Map();
  rows.forEach((row) => counts.set(value(row, statusAt), (counts.get(value(row, statusAt)) ?? 0) + 1));
  counts.forEach((count, status) => {
    const chip = make("button", `${count} ${status}`);
    chip.type = "button";
    chip.setAttribute("aria-pressed", "false");
    chip.addEventListener("click", () => {
      if (!statuses.delete(status)) statuses.add(status);
      chip.setAttribute("aria-pressed", String(statuses.has(status)));
      choose();
    });
    find("#chips").append(chip, " ");
  });
  find("#filter").addEventListener("input", () => { limit = PAGE; choose(); });
  find("#more").addEventListener("click", () => { limit += 5 * PAGE; show(); });
  choose();
})();
