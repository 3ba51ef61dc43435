"""J6: programs lowered or exported for devices that are not there, or elsewhere."""

import catalogue
import jax
import jax.export
import models
import numpy as np
import pytest

import jaxcomm

X = np.sin(np.arange(64, dtype=np.float32)).reshape(16, 4)
SPEC = jax.P("i")


def over(mesh, local, out_specs=SPEC):
    return models.over(mesh, local, SPEC, out_specs)


def abstract(mesh):
    return jax.sharding.AbstractMesh(
        mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types
    )


def export_abstract(mesh, local):
    mesh = abstract(mesh)
    sharding = jax.NamedSharding(mesh, SPEC)
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding)
    return jax.export.export(over(mesh, local), platforms=["cpu"])(x)


def call(exported, mesh):
    return jax.jit(exported.call)(jax.device_put(X, jax.NamedSharding(mesh, SPEC)))


def every(backend):
    def local(x):
        choice = catalogue.fixed(4)
        outs = {
            name: case(jaxcomm, x, "i", choice, backend=backend)
            for name, case in catalogue.CASES.items()
        }
        outs["psum in groups"] = jaxcomm.psum(
            x, "i", axis_index_groups=[[0, 3], [1, 2]], backend=backend
        )
        # Results that are equal on all devices leave as the others do.
        return {
            name: out
            if jax.typeof(out).mat.varying
            else jaxcomm.pcast(out, "i", to="varying")
            for name, out in outs.items()
        }

    return local


def test_every_collective_is_exported_for_an_abstract_mesh(make_mesh):
    mesh = make_mesh(i=4)
    exported = export_abstract(mesh, every("xla"))
    assert exported.nr_devices == 4
    assert "jaxcomm." not in exported.mlir_module()
    assert len(jaxcomm.communicators()) == 0  # nobody's devices, nobody's communicator
    found = call(exported, mesh)
    expected = over(mesh, every("host"))(X)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, 1e-6, 1e-6, err_msg=name)


def test_an_exported_program_serves_devices_in_any_order(make_mesh):
    """XLA counts ranks along the mesh it is called on."""
    mesh = make_mesh(i=4)
    crossed = jax.sharding.Mesh(
        mesh.devices[::-1], mesh.axis_names, axis_types=mesh.axis_types
    )

    def local(x):
        return jaxcomm.pscan(x, "i", backend="xla")

    exported = jax.export.export(over(mesh, local))(X)
    expected = np.cumsum(X.reshape(4, 4, 4), 0, dtype=np.float32).reshape(X.shape)
    for m in (mesh, crossed):
        np.testing.assert_allclose(call(exported, m), expected, 1e-6, 1e-6)
    # An abstract mesh is lowered for the devices of the arguments.
    placed = jax.device_put(X, jax.NamedSharding(crossed, SPEC))
    found = over(abstract(mesh), local)(placed)
    np.testing.assert_allclose(found, expected, 1e-6, 1e-6)


def test_our_own_backend_refuses_an_abstract_mesh(make_mesh):
    mesh = make_mesh(i=4)
    message = (
        r"psum over \('i',\): .* abstract mesh, .* devices; .* jax\.set_mesh"
        r".* backend='xla'"
    )
    placed = jax.device_put(X, jax.NamedSharding(mesh, SPEC))
    with pytest.raises(ValueError, match=message):
        over(abstract(mesh), lambda x: jaxcomm.psum(x, "i"), out_specs=jax.P())(placed)
    # Where no argument has devices either, JAX speaks first.
    with pytest.raises(ValueError, match="AbstractMesh cannot be used when"):
        export_abstract(mesh, lambda x: jaxcomm.pscan(x, "i"))


def test_symbolic_shapes_are_for_xla_s_collectives_and_refused_in_words(make_mesh):
    mesh, sizes = make_mesh(i=4), jax.export.symbolic_shape("4*b, 4")
    x = jax.ShapeDtypeStruct(sizes, X.dtype)

    def exported(**options):
        def local(x):
            x = jaxcomm.ppermute(x, "i", [(0, 1)], **options)
            return jaxcomm.psum(x, "i", **options)

        program = models.over(mesh, local, SPEC, SPEC, check_vma=False)
        return program, jax.export.export(program)(x)

    program, made = exported(backend="xla")
    made = jax.export.deserialize(made.serialize())
    np.testing.assert_allclose(call(made, mesh), program(X), 1e-6)
    for backend in (None, "host"):
        with pytest.raises(ValueError, match=r"symbolic shape \(b, .*backend='xla'"):
            exported(backend=backend)


# our own custom calls


def ours(x):
    return jaxcomm.pscan(x, "i"), jaxcomm.ring_shift(x, "i")


def test_an_exported_program_of_ours_needs_its_communicators(make_mesh):
    """It names them by content: init on the same mesh brings them back."""
    opt_out = [
        jax.export.DisabledSafetyCheck.custom_call(f"jaxcomm.{name}")
        for name in ("scan", "permute")
    ]
    mesh = make_mesh(i=4)
    program = over(mesh, ours)
    with pytest.raises(ValueError, match=r"custom_call @jaxcomm\.permute"):
        jax.export.export(program, disabled_checks=opt_out[:1])(X)
    exported = jax.export.export(program, disabled_checks=opt_out)(X)
    exported = jax.export.deserialize(exported.serialize())
    expected = jax.tree.map(np.asarray, program(X))
    jax.tree.map(np.testing.assert_array_equal, call(exported, mesh), expected)

    jaxcomm.finalize()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"Call jaxcomm\.init\(mesh"):
        jax.block_until_ready(call(exported, mesh))
    jaxcomm.init(mesh)
    jax.tree.map(np.testing.assert_array_equal, call(exported, mesh), expected)
    elsewhere = jax.sharding.Mesh(
        jax.devices()[4:], mesh.axis_names, axis_types=mesh.axis_types
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="not part of this commun"):
        jax.block_until_ready(call(exported, elsewhere))
