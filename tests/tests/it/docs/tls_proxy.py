"""A proxy with TLS that asks for a token: `tls_proxy.py PEM TOKEN HOST:PORT`. Prints its port."""

import socket
import ssl
import sys
import threading

REFUSAL = b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def copy(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def serve(raw: socket.socket, context: ssl.SSLContext, token: str, registry: tuple[str, int]) -> None:
    """Serves one request: the registry is told to close the connection after it."""
    try:
        client = context.wrap_socket(raw, server_side=True)
        head = b""
        while b"\r\n\r\n" not in head:
            if not (data := client.recv(1 << 16)):
                return
            head += data
    except OSError:
        return
    lines, rest = head.split(b"\r\n\r\n", 1)
    first, *fields = lines.split(b"\r\n")
    known = {name.strip().lower(): value.strip() for name, _, value in (field.partition(b":") for field in fields)}
    if known.get(b"authorization") != f"Bearer {token}".encode():
        client.sendall(REFUSAL)
        client.close()
        return
    server = socket.create_connection(registry)
    server.sendall(b"\r\n".join([first, b"connection: close", *fields, b"", rest]))
    threading.Thread(target=copy, args=(client, server), daemon=True).start()
    copy(server, client)
    client.close()


def main() -> None:
    pem, token, registry = sys.argv[1:]
    host, port = registry.rsplit(":", 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        raw, _ = listener.accept()
        threading.Thread(target=serve, args=(raw, context, token, (host, int(port))), daemon=True).start()


main()
