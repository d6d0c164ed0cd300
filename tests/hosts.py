"""Network hosts on one machine: namespaces that are joined by a switch."""

import subprocess

# Those of the pages' commands.
ADDRESSES = ("192.0.2.1", "192.0.2.2", "192.0.2.3")


def ip(words):
    subprocess.check_call(["ip", *words.split()])


class Hosts:
    """Host n has ADDRESSES[n]. Its own name leads to 127.0.1.1, as Debian writes it.

    With names_known the names of all hosts lead to their addresses.
    """

    def __init__(self, prefix, folder, number=2, names_known=False):
        self.namespaces = [f"{prefix}{host}" for host in range(number)]
        self.switch = f"{prefix}switch"
        self.files = [folder / f"{namespace}.hosts" for namespace in self.namespaces]
        every = "".join(f"{ADDRESSES[host]} host{host}\n" for host in range(number))
        for host, file in enumerate(self.files):
            file.write_text(
                "127.0.0.1 localhost\n" + (every if names_known else f"127.0.1.1 host{host}\n")
            )

    def __enter__(self):
        for namespace in (self.switch, *self.namespaces):
            ip(f"netns add {namespace}")
        ip(f"-n {self.switch} link add bridge up type bridge")
        for number, host in enumerate(self.namespaces):
            ip(f"-n {host} link add eth0 type veth peer name port{number} netns {self.switch}")
            ip(f"-n {self.switch} link set port{number} master bridge up")
            ip(f"-n {host} address add {ADDRESSES[number]}/24 dev eth0")
            ip(f"-n {host} link set eth0 up")
            ip(f"-n {host} link set lo up")
        return self

    def __exit__(self, *_):
        for namespace in (*self.namespaces, self.switch):
            ip(f"netns delete {namespace}")

    def command_on(self, host, line):
        """The command that runs a shell line there, with the host's own name and /etc/hosts."""
        # ip netns exec gives the command mounts of its own, so that no other process sees this one.
        settings = f"mount --bind {self.files[host]} /etc/hosts; hostname host{host}"
        shell = ["unshare", "--uts", "bash", "-c", f"{settings}; exec env {line}"]
        return ["ip", "netns", "exec", self.namespaces[host], *shell]
