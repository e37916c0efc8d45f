// Actions of the run's owner: buttons that only a visitor with the owner's secret gets.

import { byId, make, put } from "./words.js";

const SURE_MS = 3000;
const WORDS = { kill: "kill", drain: "ask to leave", freeze: "freeze", wake: "wake", expel: "expel" };
const ACTION_OF = { stop: "stop", pause: "pause", "more-steps": "steps" };
const DONE = { pause: "after the current step", continue: "requested", steps: "requested", stop: "after the current step" };

export class Owner {
  constructor(secret) {
    this.secret = secret;
    this.actions = [];
    byId("stop").addEventListener("click", () => this.surely(byId("stop"), () => this.act("stop", "")));
    byId("pause").addEventListener("click", () => this.act(this.paused ? "continue" : "pause", ""));
    byId("more-steps").addEventListener("submit", (event) => {
      event.preventDefault();
      this.act("steps", "", null, Number(byId("steps-wanted").value));
      byId("steps-wanted").blur();
    });
  }

  // Update the buttons to the state of the run.
  now(run) {
    this.paused = run.phase === "paused";
    put(byId("pause"), this.paused ? "continue" : "pause");
    const over = run.phase === "finished";
    for (const id of ["stop", "pause", "more-steps"]) byId(id).hidden = over || !this.actions.includes(ACTION_OF[id]);
    const wanted = byId("steps-wanted");
    if (document.activeElement !== wanted && run.steps) wanted.value = String(run.steps);
  }

  // Actions that the server allows; none without the owner's secret.
  may(actions) {
    this.actions = actions ?? [];
  }

  // The buttons of one peer.
  show(node) {
    const box = byId("details-acts");
    const acts = this.actions.filter((action) => action in WORDS);
    box.hidden = !node || !acts.length || ["left", "crashed"].includes(node.state);
    if (box.hidden || box.shown === node.id) return;
    box.shown = node.id;
    box.replaceChildren(...acts.map((action) => {
      const button = make("button", { type: "button", class: "chip on" }, WORDS[action]);
      const act = () => this.act(action, node.id, button);
      button.addEventListener("click", () => action === "expel" ? this.surely(button, act, "really expel?") : act());
      return button;
    }));
  }

  // Ask twice before what cannot be taken back.
  surely(button, then, question = "really stop?") {
    const words = button.textContent;
    if (button.classList.toggle("sure")) {
      button.textContent = question;
      button.words = words;
      setTimeout(() => this.calm(button), SURE_MS);
    } else {
      this.calm(button);
      then();
    }
  }

  calm(button) {
    button.classList.remove("sure");
    button.textContent = button.words;
  }

  async act(action, peer, button, steps = 0) {
    const headers = { Authorization: `Bearer ${this.secret}`, "Content-Type": "application/json" };
    const asked = { method: "POST", headers, body: JSON.stringify({ action, peer, steps }) };
    const said = (await fetch("act", asked).then((answer) => answer.text()).catch(() => "no answer; try again")).trim();
    byId("act-said").textContent = `${action}: ${said === "done" ? DONE[action] ?? said : said}`;
    if (button) button.title = said;
  }
}
