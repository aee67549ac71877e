// Search without a server: browsers start no worker from a file, so there one is played by a frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "search";
      document.documentElement.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((resolve) => {
        const script = inside.document.createElement("script");
        script.src = url;
        script.onload = () => resolve(inside);
        inside.document.head.append(script);
      });
    }
    postMessage(data) {
      this.ready.then((inside) => {
        inside.dispatchEvent(new inside.MessageEvent("message", { data }));
      });
    }
  };
}
