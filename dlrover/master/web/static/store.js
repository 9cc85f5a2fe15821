// What is known of the job: a copy of the master's board, kept up to date by its events.

export class Store {
  constructor() {
    this.reset();
    this.listeners = [];
  }

  reset() {
    this.sections = {};
    this.series = {};
    this.dirty = new Set();
  }

  // One difference from the master. Returns the names of what changed.
  take(delta) {
    if (delta.is_whole) this.reset();
    const changed = new Set(delta.is_whole ? ["whole"] : []);
    for (const [section, items] of Object.entries(delta.sections)) {
      const known = (this.sections[section] ??= new Map());
      for (const [key, value] of Object.entries(items)) {
        if (value === null) known.delete(key);
        else known.set(key, value);
      }
      changed.add(section);
    }
    for (const [name, news] of Object.entries(delta.series)) {
      this.series[name] = news.is_whole ? news.points : (this.series[name] ?? []).concat(news.points);
      changed.add("series");
    }
    return changed;
  }

  // The master does not say when the oldest of a list are gone.
  dropOlder(section, number) {
    for (const key of this.sections[section].keys()) if (Number(key) < number) this.sections[section].delete(key);
  }

  one(section) {
    return this.sections[section]?.get("") ?? null;
  }

  all(section) {
    return [...(this.sections[section]?.values() ?? [])];
  }
}

// Follows the events until closed. The browser reconnects by itself and says what it has seen; after a refusal we do it.
export function follow(store, { onChange, onState }) {
  let source = null;
  let timer = null;
  function open() {
    source = new EventSource("/api/v1/stream");
    source.onopen = () => onState("live");
    source.onmessage = (event) => {
      onState("live");
      onChange(store.take(JSON.parse(event.data)));
    };
    source.onerror = () => {
      if (store.one("job")?.end) {
        source.close();
        onState("over");
        return;
      }
      if (source.readyState !== EventSource.CLOSED) {
        onState("again");
        return;
      }
      onState("broken");
      clearTimeout(timer);
      timer = setTimeout(open, 3000);
    };
  }
  open();
  return () => {
    clearTimeout(timer);
    source.close();
  };
}
