"""Robots like the paper's.

The paper ran on Brax v1, whose ant and halfcheetah are other robots than those that brax ships today
under the same names. `bodies/ant_v1.xml` and `bodies/halfcheetah_v1.xml` describe them with the source of
every number; here is what such a file cannot say: how v1's motors, joints and ground differ from those of
brax's `spring`, its descendant. What was matched and what it does: `docs/robots.md`.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from brax import actuator, kinematics, math
from brax.base import Motion, Transform
from brax.envs.base import PipelineEnv, State
from brax.io import mjcf
from brax.spring import integrator, joints
from jaxtyping import Array, Float, PRNGKeyArray

from machinery.lanes import spring_state
from machinery.robots import start_on_joints

UP = np.array([0.0, 0.0, 1.0], np.float32)
CAPSULE = 3  # MuJoCo's number for the shape (mjtGeom)
SUBSTEPS = {"ant": 10, "halfcheetah": 16}  # of 0.05 s


def description(robot: str) -> str:
    """The body in MJCF."""
    return (Path(__file__).parent / "bodies" / f"{robot}_v1.xml").read_text()


class RobotV1(PipelineEnv):
    """One of the described robots. Reward and end of an episode are the task's matter, not its.

    Its physics state has in `contact`, for each link, whether the ground pushed it in this step.
    """

    def __init__(self, robot: str, body: str | None = None):
        """`body`: a description of one's own in place of the robot's."""
        self.robot = robot
        system = mjcf.loads(body or description(robot))
        super().__init__(sys=system, backend="spring", n_frames=SUBSTEPS[robot])
        self.balls = _balls(self.sys.mj_model)

    def reset(self, rng: PRNGKeyArray) -> State:
        physics, zero = start_on_joints(self, rng), jnp.zeros(())
        return State(physics, self._get_obs(physics), zero, zero, {})

    def step(self, state: Any, action: Float[Array, " action"]) -> State:
        physics = self.pipeline_step(state.pipeline_state, action)
        return state.replace(pipeline_state=physics, obs=self._get_obs(physics))

    def pipeline_init(self, q: Float[Array, " q"], qd: Float[Array, " qd"], *_: Any) -> Any:
        physics: Any = super().pipeline_init(q, qd)
        return physics.replace(contact=jnp.zeros(self.sys.num_links()))

    def set_down(self, q: Float[Array, " q"]) -> Float[Array, " q"]:
        """The same pose with its lowest point on the ground, as v1 begins."""
        x, _ = kinematics.forward(self.sys, q, jnp.zeros(self.sys.qd_size()))
        height = self.lowest(x)[:, 2].min()
        return q.at[2 if self.sys.link_types[0] == "f" else 1].add(-height)

    def pipeline_step(self, pipeline_state: Any, action: Float[Array, " action"]) -> Any:
        """Without lanes; on a CPU, `lanes.spring_step` takes its place."""

        def substep(physics: Any, _: None) -> tuple[Any, None]:
            after = self.substep(physics, action)
            touched = jnp.maximum(physics.contact, after.contact)
            return spring_state(self.sys, after.x_i, after.xd_i, touched), None

        start = pipeline_state.replace(contact=jnp.zeros_like(pipeline_state.contact))
        return jax.lax.scan(substep, start, length=self._n_frames)[0]

    def _get_obs(self, physics: Any) -> Float[Array, " observation"]:
        """v1's, without the ant's contact forces: all but where it is."""
        if self.robot == "ant":
            return jnp.concatenate([physics.q[2:], physics.qd])
        height, pitch = physics.q[1:2], physics.q[2:3]
        rotation = [jnp.cos(pitch / 2), jnp.sin(pitch / 2)]  # two numbers of a quaternion
        return jnp.concatenate([height, *rotation, physics.q[3:], physics.qd])

    # --- one sub-step: positions, velocities and contacts after it; the rest follows from them ---

    def substep(self, physics: Any, action: Float[Array, " action"]) -> Any:
        physics = physics.replace(jd=self.joint_velocity(physics))
        torque = actuator.to_tau(self.sys, self.drive(physics.q, action), physics.q, physics.qd)
        force = joints.resolve(self.sys, physics, torque)
        dt = self.sys.opt.timestep
        faster = Motion(
            ang=jax.vmap(jnp.dot)(physics.i_inv, force.ang) * dt,
            vel=(force.vel / physics.mass[:, None] + self.sys.gravity) * dt,
        )
        xd_i = physics.xd_i + faster
        push, touched = self.ground(physics, xd_i)
        x_i, xd_i = integrator.integrate(self.sys, physics.x_i, xd_i, push)
        return physics.replace(x_i=x_i, xd_i=xd_i, contact=touched)

    def drive(
        self, q: Float[Array, " q"], action: Float[Array, " action"]
    ) -> Float[Array, " action"]:
        """What reaches the joints: v1's motors do nothing while their joint is beyond its limits."""
        motors, (low, high) = self.sys.actuator, self.sys.dof.limit
        angle, low, high = q[motors.q_id], low[motors.qd_id], high[motors.qd_id]
        return jnp.where((angle < low) | (angle > high), 0.0, action)

    def joint_velocity(self, physics: Any) -> Motion:
        """Of each link relative to its parent at their joint, which a joint's springs damp.

        The joint moves with its parent at v + ω × (joint − parent); `kinematics.world_to_joint` of
        brax 0.14 has the difference the other way round, and damping as strong as v1's blows up.
        """
        parent = jnp.array(self.sys.link_parents)
        x_p = physics.x.concatenate(Transform.zero((1,))).take(parent)
        xd_p = physics.xd.concatenate(Motion.zero((1,))).take(parent)
        at_joint = Transform.create(pos=physics.a_p.pos - x_p.pos).vmap().do(xd_p)
        turn = jax.vmap(math.inv_rotate)
        return jax.tree.map(lambda x: turn(x, physics.a_p.rot), physics.xd - at_joint)

    def lowest(self, x: Transform) -> Float[Array, "balls 3"]:
        """The lowest point of each ball."""
        link, centre, radius = self.balls
        place = x.take(link).vmap().do(Transform.create(pos=centre)).pos
        return place - radius[:, None] * UP

    def ground(self, physics: Any, xd_i: Motion) -> tuple[Motion, Float[Array, " links"]]:
        """How the ground changes the velocities of the links, and which it touches.

        As brax's `spring.collisions` but for two things of v1: friction is computed with the inertia
        that the normal direction meets, and below 1 cm/s there is none.
        """
        link, dt = self.balls[0], self.sys.opt.timestep
        friction = self.sys.mj_model.geom_friction[0, 0]
        point = self.lowest(physics.x)
        arm = point - physics.x_i.pos[link]
        i_inv, i_mass = physics.i_inv[link], 1 / physics.mass[link]

        def impulse(point: Array, arm: Array, vel: Array, ang: Array, i_inv: Array, i_mass: Array):
            speed = vel + jnp.cross(ang, arm)
            along = speed - speed[2] * UP
            slip = math.safe_norm(along)
            inertia = i_mass + jnp.cross(i_inv @ jnp.cross(arm, UP), arm)[2]
            normal = (-speed[2] - self.sys.baumgarte_erp / dt * point[2]) / inertia
            drag = jnp.minimum(slip / inertia, friction * normal) * (slip > 0.01)
            touches = (point[2] < 0) & (speed[2] < 0) & (normal > 0)
            force = jnp.where(touches, normal * UP - drag * along / (1e-6 + slip), 0.0)
            return force, jnp.cross(arm, force), touches.astype(force.dtype)

        found = jax.vmap(impulse)(point, arm, xd_i.vel[link], xd_i.ang[link], i_inv, i_mass)
        vel, ang, count = (jax.ops.segment_sum(x, link, self.sys.num_links()) for x in found)
        share = (1 / jnp.maximum(count, 1.0))[:, None]  # several contacts of a link: their mean
        vel = vel * share / physics.mass[:, None]
        ang = jax.vmap(jnp.dot)(physics.i_inv, ang * share)
        return Motion(ang=ang, vel=vel), jnp.minimum(count, 1.0)


def _balls(model: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What collides, as balls: spheres, and the two ends of capsules. Link, centre and radius."""
    link, centre, radius = [], [], []
    for i in range(model.ngeom):
        if not model.geom_contype[i]:
            continue
        ends = [0.0]
        if model.geom_type[i] == CAPSULE:
            ends = [-model.geom_size[i, 1], model.geom_size[i, 1]]
        for end in ends:
            along = np.asarray(math.rotate(end * UP, model.geom_quat[i]))
            link.append(model.geom_bodyid[i] - 1)
            centre.append(model.geom_pos[i] + along)
            radius.append(model.geom_size[i, 0])
    return np.array(link), np.array(centre, np.float32), np.array(radius, np.float32)
