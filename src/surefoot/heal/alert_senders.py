"""Where alerts go: a webhook, Slack, mail, a command. Each delivery is bounded in time, and what failed is said without any address.

The words of a failure are written to the ledger and to logs. An address may be a secret by itself (that of a Slack webhook is), so what
libraries say is not passed on: only the kind of failure, a status, an exit code.
"""

from __future__ import annotations

import os
import signal
import smtplib
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import EmailMessage
from http.client import HTTPException, HTTPMessage
from ipaddress import ip_address
from socket import gaierror
from typing import IO, Any, Final
from urllib.parse import SplitResult, unquote, urlsplit

from surefoot.core import strict_json
from surefoot.core.errors import ConfigError, SurefootError
from surefoot.core.sections import AlertsSection
from surefoot.core.version import __version__
from surefoot.heal.alerts import Alert

SCHEMA_VERSION: Final = 1
_ENV: Final = "env:"
_SLACK_TEXT: Final = 2900  # Slack refuses a section of more than 3,000 characters
_SMTP_PORT, _SMTPS_PORT = 25, 465


class Undelivered(SurefootError):
    """A delivery that failed. Its words hold no address and no secret."""

    code = "undelivered"


@dataclass(frozen=True, slots=True)
class Destination:
    """`name` is webhook, slack, email or command. The rest may be secret and is never shown."""

    name: str
    address: str = field(repr=False)
    recipients: tuple[str, ...] = field(default=(), repr=False)
    mail_from: str = field(default="", repr=False)


def destinations(section: AlertsSection, *, environ: Mapping[str, str], host: str) -> tuple[Destination, ...]:
    """All that `section` names, with what `env:NAME` stands for. Raises ConfigError for a name that is not set and for what cannot work."""
    found = []
    for name, value in (("webhook", section.webhook), ("slack", section.slack)):
        if value:
            address = _resolved(value, environ, where=f"alerts.{name}")
            if urlsplit(address).scheme not in ("http", "https"):
                raise ConfigError("it is no http or https address", where=f"alerts.{name}", hint="write https://..., or env:NAME")
            found.append(Destination(name, address))
    if section.email:
        if not section.smtp:
            raise ConfigError("alerts.email needs a mail server", where="alerts.smtp", hint='smtp = "localhost:25", or env:NAME')
        server = _resolved(section.smtp, environ, where="alerts.smtp")
        _server_of(server)
        found.append(Destination("email", server, section.email, section.email_from or f"surefoot@{host}"))
    if section.command:
        found.append(Destination("command", section.command))
    return tuple(found)


def deliver(destination: Destination, alert: Alert, *, timeout_s: float) -> None:
    """Raises Undelivered when it is not known to have arrived."""
    if destination.name == "webhook":
        _post(destination.address, as_json(alert), timeout_s=timeout_s)
    elif destination.name == "slack":
        _post(destination.address, as_slack(alert), timeout_s=timeout_s)
    elif destination.name == "email":
        _mail(destination, alert, timeout_s=timeout_s)
    else:
        _run(destination.address, as_json(alert), timeout_s=timeout_s)


def as_json(alert: Alert) -> dict[str, Any]:
    """The generic form, for webhooks and commands."""
    told: dict[str, Any] = strict_json.plain(alert)
    return {"schema_version": SCHEMA_VERSION, "title": alert.title, **told}


def as_text(alert: Alert) -> str:
    """For people: mail, and the plain part of a Slack message."""
    rows = (
        ("what", alert.what),
        ("where", alert.where),
        ("when", alert.time_utc),
        ("action", alert.action),
        ("next", alert.command),
        ("runbook", alert.runbook),
    )
    return "\n".join(f"{name:<8} {value}" for name, value in rows if value)


def as_slack(alert: Alert) -> dict[str, Any]:
    """The form of a Slack incoming webhook: `text` for notifications, `blocks` for the message."""
    head = f"[{alert.severity}] {alert.title}"
    rows = (("What", alert.what), ("Where", alert.where), ("Action", alert.action), ("Next", f"`{alert.command}`"))
    body = "\n".join(f"*{name}* {_escaped(value)}" for name, value in rows)
    foot = f"{alert.time_utc}  runbook: {_escaped(alert.runbook)}"
    return {
        "text": f"{_escaped(head)}: {_escaped(alert.what)}"[:_SLACK_TEXT],
        "blocks": [
            {"type": "header", "text": {"type": "plain_text", "text": head[:150]}},
            {"type": "section", "text": {"type": "mrkdwn", "text": body[:_SLACK_TEXT]}},
            {"type": "context", "elements": [{"type": "mrkdwn", "text": foot}]},
        ],
    }


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _resolved(value: str, environ: Mapping[str, str], *, where: str) -> str:
    if not value.startswith(_ENV):
        return value
    name = value.removeprefix(_ENV)
    if not environ.get(name):
        raise ConfigError(f"the environment has no {name}", where=where, hint=f"export {name}=... before the start")
    return environ[name]


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected POST arrives as a GET without its body, and would be taken for a delivery."""

    def redirect_request(self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str) -> None:
        return None


def _post(address: str, message: Mapping[str, Any], *, timeout_s: float) -> None:
    body = strict_json.dumps(message).encode()
    headers = {"Content-Type": "application/json", "User-Agent": f"surefoot/{__version__}"}
    try:
        request = urllib.request.Request(address, data=body, headers=headers, method="POST")
        with urllib.request.build_opener(_NoRedirects()).open(request, timeout=timeout_s):
            return  # any 2xx; the answer's body is not read
    except urllib.error.HTTPError as error:
        error.close()
        raise Undelivered(f"the receiver answered {error.code}") from None
    except urllib.error.URLError as error:
        raise Undelivered(_words_of(error.reason)) from None
    except (OSError, HTTPException, ValueError) as error:
        raise Undelivered(_words_of(error)) from None


def _mail(destination: Destination, alert: Alert, *, timeout_s: float) -> None:
    server = _server_of(destination.address)
    message = EmailMessage()
    message["Subject"] = _one_line(f"[surefoot {alert.severity}] {alert.title}")
    message["From"], message["To"] = destination.mail_from, ", ".join(destination.recipients)
    message.set_content(as_text(alert) + "\n")
    host = server.hostname or "localhost"
    try:
        with _connected(server, host, timeout_s=timeout_s) as smtp:
            is_private = isinstance(smtp, smtplib.SMTP_SSL)
            smtp.ehlo()
            if not is_private and smtp.has_extn("starttls"):
                smtp.starttls()
                smtp.ehlo()
                is_private = True
            if server.username:
                if not is_private and not _is_this_machine(host):
                    raise Undelivered("the mail server offers no TLS, and a password is not sent in the clear")
                smtp.login(unquote(server.username), unquote(server.password or ""))
            refused = smtp.send_message(message)
    except smtplib.SMTPResponseException as error:
        raise Undelivered(f"the mail server answered {error.smtp_code}") from None
    except smtplib.SMTPRecipientsRefused as error:
        raise Undelivered(f"the mail server refused all {len(error.recipients)} recipients") from None
    except (OSError, ValueError) as error:  # smtplib's own errors are OSErrors
        raise Undelivered(_words_of(error)) from None
    if refused:
        raise Undelivered(f"the mail server refused {len(refused)} of {len(destination.recipients)} recipients")


def _connected(server: SplitResult, host: str, *, timeout_s: float) -> smtplib.SMTP:
    if server.scheme == "smtps":
        return smtplib.SMTP_SSL(host, server.port or _SMTPS_PORT, timeout=timeout_s)
    return smtplib.SMTP(host, server.port or _SMTP_PORT, timeout=timeout_s)


def _server_of(address: str) -> SplitResult:
    """`address` as scheme, user, host and port. Raises ConfigError, without the address: it may hold a password."""
    server = urlsplit(address if "://" in address else f"smtp://{address}")
    with suppress(ValueError):
        if server.scheme in ("smtp", "smtps") and server.hostname and (server.port is None or server.port > 0):
            return server
    raise ConfigError("it is no mail server", where="alerts.smtp", hint="write host:port, or env:NAME with smtp://user:password@host:port")


def _is_this_machine(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _run(command: str, message: Mapping[str, Any], *, timeout_s: float) -> None:
    """In a group of its own, so that what it started ends with it."""
    child = subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        with suppress(BrokenPipeError):
            child.communicate(strict_json.dumps(message).encode() + b"\n", timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise Undelivered(f"the command did not end within {timeout_s:g} s") from None
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if child.returncode:
        raise Undelivered(f"the command ended with {child.returncode}")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _words_of(error: object) -> str:
    """Kind of failure and, of the operating system's, its own words, which name no address."""
    if isinstance(error, TimeoutError):
        return "the receiver did not answer in time"
    if isinstance(error, gaierror):
        return "the name of the receiver is not known"
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return type(error).__name__ if isinstance(error, BaseException) else "it could not be reached"
