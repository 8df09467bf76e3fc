// Theme and search. Everything works from file:// too.
const root = document.documentElement;
const keep = (theme) => { try { localStorage.theme = theme; } catch { /* private window */ } };
try { root.style.colorScheme = localStorage.theme || ""; } catch { /* private window */ }

document.addEventListener("DOMContentLoaded", () => {
  document.getElementById("theme").onclick = () => {
    const dark = root.style.colorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    keep(root.style.colorScheme = dark === "dark" ? "light" : "dark");
  };
  document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest" });
  const input = document.getElementById("search"), found = document.getElementById("found");
  input.onfocus = () => {
    if (!window.loading) {
      window.loading = document.head.appendChild(document.createElement("script"));
      window.loading.onload = search;
      window.loading.src = "search.js";
    }
  };
  input.oninput = search;
  document.addEventListener("keydown", (e) => {
    const links = [...found.querySelectorAll("a")], at = links.indexOf(document.activeElement);
    if (e.key === "/" && document.activeElement !== input) { e.preventDefault(); input.focus(); }
    if (e.key === "Escape") found.hidden = true;
    if (e.key === "Enter" && document.activeElement === input && links[0]) links[0].click();
    if (e.key.startsWith("Arrow") && !found.hidden && links.length && (at >= 0 || document.activeElement === input)) {
      e.preventDefault();
      (links[at + (e.key === "ArrowDown" ? 1 : -1)] || input).focus();
    }
  });
  document.addEventListener("click", (e) => { if (!e.target.closest(".search")) found.hidden = true; });

  // Sections that hold every word; a word in a heading counts more than one in the text.
  function search() {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    found.hidden = !words.length;
    if (!words.length || !window.SECTIONS) return;
    const hits = [];
    for (const [page, id, title, heading, text] of SECTIONS) {
      const body = text.toLowerCase(), head = `${title} ${heading}`.toLowerCase();
      if (words.every((w) => head.includes(w) || body.includes(w))) {
        const score = words.reduce((s, w) => s + 20 * head.includes(w) + Math.min(body.split(w).length - 1, 5), 0);
        hits.push({ score, page, id, title, heading, text, at: body.indexOf(words[0]) });
      }
    }
    hits.sort((a, b) => b.score - a.score);
    found.replaceChildren(...hits.slice(0, 12).map((h) => {
      const item = document.createElement("li"), link = item.appendChild(document.createElement("a"));
      link.href = `${h.page}.html${h.id && "#" + encodeURIComponent(h.id)}`;
      link.textContent = h.heading === h.title ? h.title : `${h.title} › ${h.heading}`;
      const start = Math.max(0, h.at - 40);
      link.appendChild(document.createElement("small")).textContent = h.text.slice(start, start + 130);
      return item;
    }));
    if (!hits.length) found.appendChild(document.createElement("li")).textContent = "No section holds all of these words.";
  }
});
