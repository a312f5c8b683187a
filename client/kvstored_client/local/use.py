"""Who uses a session: a step, or a word that is being sent. A session outlasts them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstored_client.local.link import Link


class Use:
    """One user of a session. Ends with `end`, or when it is dropped: an exception of a signal
    handler may keep any statement from being reached.
    """

    link: Link | None = None

    def end(self) -> None:
        """It needs the session no more. Again: nothing. Takes no lock, never raises."""
        link = self.link
        if link is not None:
            link.leave(self)

    def __del__(self) -> None:
        self.end()
