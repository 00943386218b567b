"""The certificate of a job: made once by rank 0, held by all its keepers, in memory only."""

import os
import ssl
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Certificate:
    """What all keepers of a job share. Whoever has the key belongs to the job."""

    cert_pem: str
    key_pem: str = field(repr=False)

    def context(self, purpose: int) -> ssl.SSLContext:
        """For ``ssl.PROTOCOL_TLS_SERVER`` or ``ssl.PROTOCOL_TLS_CLIENT``. The key is never written to a file."""
        context = ssl.SSLContext(purpose)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate itself is the identity
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.cert_pem)
        fd = os.memfd_create("lazysnap-link", os.MFD_CLOEXEC)
        try:
            with open(fd, "wb", closefd=False) as memory:
                memory.write((self.cert_pem + self.key_pem).encode())
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return context


def make_certificate() -> Certificate:
    """A new certificate and its key: rank 0 makes them and hands them over through the process group."""
    import datetime  # made once per job, by one process: no other one pays for the import

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "lazysnap job")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2))  # clocks of nodes differ
        .not_valid_after(now + datetime.timedelta(days=3650))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    no_password = serialization.NoEncryption()
    pkcs8, pem = serialization.PrivateFormat.PKCS8, serialization.Encoding.PEM
    return Certificate(certificate.public_bytes(pem).decode(), key.private_bytes(pem, pkcs8, no_password).decode())
