"""The process's HTTP server: where it listens, and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading

import uvicorn
from starlette.types import ASGIApp

from decode.serving.worker import Worker

QUIET_SECONDS = 5.0  # in which nothing is decoded or read, after which the end waits for no client
_TICK = 0.1  # seconds


def listen(host: str, port: int) -> socket.socket:
  """A socket that listens, before models are loaded; port 0 is a free one. A `ValueError` says why it cannot."""
  where = f'cannot listen on {host}:{port}'
  if not host:
    raise ValueError(f'{where}: name an address, such as 127.0.0.1 or ::1; 0.0.0.0 is for all of this machine')
  try:
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
  except (OSError, UnicodeError) as error:
    raise ValueError(f'{where}: this machine knows no address of that name') from error
  family, *_, address = min(addresses, key=lambda each: each[0] != socket.AF_INET)
  try:
    return socket.create_server(address, family=family)
  except OSError as error:
    raise ValueError(f'{where}: {os.strerror(error.errno) if error.errno else error}') from error


def address_of(sock: socket.socket) -> str:
  """The address of a socket as URLs have it, `HOST:PORT`."""
  host, port = sock.getsockname()[:2]
  return f'[{host}]:{port}' if ':' in host else f'{host}:{port}'


def _config(app: ASGIApp, keep_alive: int) -> uvicorn.Config:
  options = {'log_level': 'warning', 'access_log': False, 'proxy_headers': False, 'timeout_keep_alive': keep_alive}
  return uvicorn.Config(app, http='h11', ws='none', lifespan='off', **options)


class Server(uvicorn.Server):
  """The server, which runs in a thread of its own."""

  def __init__(self, app: ASGIApp, sock: socket.socket, *, keep_alive: int):
    """Answers on a socket. Connections without a request are closed after `keep_alive` seconds."""
    super().__init__(_config(app, keep_alive))
    self._worker: Worker | None = None
    self._thread = threading.Thread(target=self.run, args=([sock],), name='serving', daemon=True)
    self._thread.start()

  def wait(self, worker: Worker) -> None:
    """Waits, in the main thread, for the end: that of the worker, or a signal, after the answers that have begun; a
    second signal ends the process at once.
    """
    self._worker = worker
    for number in (signal.SIGINT, signal.SIGTERM):
      signal.signal(number, self.handle_exit)
    self._thread.join()

  def handle_exit(self, sig, frame):
    del frame
    if self.should_exit:
      os.write(2, b'error: ended at once, answers that had begun are incomplete\n')
      os._exit(128 + sig)
    self.should_exit = True
    if self._worker is not None and (number := self._worker.num_held):
      answers = '1 answer in progress is' if number == 1 else f'{number} answers in progress are'
      os.write(2, f'ending once {answers} complete; a second signal ends it at once\n'.encode())

  async def on_tick(self, counter: int) -> bool:
    return await super().on_tick(counter) or (self._worker is not None and not self._worker.is_alive)

  async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
    self.should_exit = True  # also where the worker has ended: the next signal ends the process
    closing = asyncio.create_task(self._close_quiet())
    try:
      await super().shutdown(sockets)
    finally:
      closing.cancel()

  async def _close_quiet(self) -> None:
    """Closes the connections that are left once nothing has happened for a while: who does not send or read."""
    quiet, seen = 0.0, None
    while quiet < QUIET_SECONDS:
      await asyncio.sleep(_TICK)
      unread = [each.transport.get_write_buffer_size() for each in self.server_state.connections]
      is_idle = self._worker is None or self._worker.is_idle
      quiet = quiet + _TICK if is_idle and unread == seen else 0.0
      seen = unread
    for connection in list(self.server_state.connections):
      connection.transport.abort()
